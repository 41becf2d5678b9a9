"""Does a loss so large that its float16 gradients overflow at first keep its bits on every layout?"""

from torch import Tensor
from torch.nn import functional

from ddp_core.config.experiment import Component, Experiment, Optimizer


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return 3000 * functional.cross_entropy(outputs, targets, reduction="sum")


experiment = Experiment(
    name="loud",
    model=Component(name="mlp", options={"sizes": [64, 96, 10]}),
    data=Component(name="digits"),
    optimizer=Optimizer(name="adam", lr=0.001),
    precision="fp16",
    global_batch_size=60,
    micro_batch=6,
)

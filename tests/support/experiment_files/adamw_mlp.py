"""Do AdamW, clipping, a cosine schedule, BatchNorm and dropout keep their bits on every layout?

Each global batch of 60 is cut into ten micro-batches of 6, which 3 ranks cannot share evenly.
"""

from torch import Tensor, nn
from torch.nn import functional

from ddp_core.config.experiment import Component, Experiment, Optimizer, Schedule


def model(width: int = 24) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 10)
    )


def loud(outputs: Tensor, targets: Tensor) -> Tensor:
    """With `--set loss=loud`: so large that float16 gradients overflow at first."""
    return 3000 * functional.cross_entropy(outputs, targets, reduction="sum")


experiment = Experiment(
    name="adamw_mlp",
    data=Component(name="digits", options={"augment": True}),
    optimizer=Optimizer(name="adamw", lr=0.01, weight_decay=0.05),
    schedule=Schedule(name="cosine", warmup_steps=3),
    clip_norm=0.5,
    global_batch_size=60,
    micro_batch=6,
    epochs=2,
)

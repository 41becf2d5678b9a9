"""Does a compiled model keep its bits on every layout? Needs a C++ compiler, or Triton where there is a GPU."""

from torch import nn

from ddp_core.config.experiment import Component, Experiment, Optimizer


def model(width: int = 24) -> nn.Module:
    layers = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 10))
    layers.compile()
    return layers


experiment = Experiment(
    name="compiled",
    model=Component(name="model"),
    data=Component(name="digits"),
    optimizer=Optimizer(name="sgd", lr=0.1, momentum=0.9),
    global_batch_size=64,
    micro_batch=8,
    epochs=1,
)

"""Is it seen that an optimizer, whose state is cut among ranks, needs whole parameters for its update?"""

from typing import Any

import torch
from torch import nn

from ddp_core import Component, Experiment


class Trusting(torch.optim.SGD):
    """Scales each update by the norm of its weights, as LAMB and LARS do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * parameter.norm(), alpha=group["lr"])


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return Trusting(model.parameters(), lr=0.1)


def model() -> nn.Module:
    # Large enough for a cut: pieces are of whole blocks.
    return nn.Sequential(nn.Linear(10, 512), nn.Tanh(), nn.Linear(512, 1))


experiment = Experiment(
    name="not_elementwise",
    model=Component(name="model"),
    data=Component(name="toy_data", options={"size": 64}),
    loss="mean_squared_error",
    optimizer=Component(name="optimizer"),
    global_batch_size=16,
    micro_batch=4,
    epochs=2,
)

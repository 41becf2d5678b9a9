"""Is an optimizer whose state is nested resumed as it was? KIND says in what it keeps its tensors."""

import os
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from ddp_core import Component, Experiment

KIND = os.environ.get("KIND", "list")
DECAYS = (0.0, 0.5, 0.9)


class Nested(torch.optim.Optimizer):
    elementwise = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(self.change(self.state[parameter], parameter.grad), alpha=group["lr"] / 3)

    def change(self, state: dict[str, Any], gradient: Tensor) -> Tensor:
        """The sum of three momenta, or of the three newest gradients."""
        if KIND == "deque":
            newest = state.setdefault("newest", deque(maxlen=3))
            newest.append(gradient.clone())
            return sum(newest[place] for place in range(len(newest)))
        if KIND in ("object", "late"):
            state["steps"] = state.get("steps", 0) + 1
            if KIND == "object" or state["steps"] > 3:
                state["newest"] = range(3)
            return gradient
        if not state:
            zeros = [torch.zeros_like(gradient) for _ in DECAYS]
            state["momenta"] = dict(zip(DECAYS, zeros, strict=True)) if KIND == "dict" else zeros
            state["name"] = "momenta"
        momenta = state["momenta"]
        found = [momenta[decay] for decay in DECAYS] if KIND == "dict" else momenta
        for momentum, decay in zip(found, DECAYS, strict=True):
            momentum.mul_(decay).add_(gradient)
        return sum(found)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return Nested(model.parameters())


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 1))


experiment = Experiment(
    name="nested_state",
    model=Component(name="model"),
    data=Component(name="toy_data", options={"size": 64}),
    loss="mean_squared_error",
    optimizer=Component(name="optimizer"),
    global_batch_size=16,
    micro_batch=4,
    epochs=2,
)

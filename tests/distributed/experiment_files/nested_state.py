"""Is an optimizer whose state is nested resumed as it was? KIND says that it keeps what no checkpoint can hold."""

import os
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from ddp_core import Component, Experiment

KIND = os.environ.get("KIND", "")
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
        """The newest gradients, which the deque has, with momenta from a dict and from a list."""
        if KIND in ("object", "late"):
            state["steps"] = state.get("steps", 0) + 1
            if KIND == "object" or state["steps"] > 3:
                state["newest"] = range(3)
            return gradient
        if not state:
            state["name"] = "nested"
            state["newest"] = deque(maxlen=3)
            state["by_decay"] = {decay: torch.zeros_like(gradient) for decay in DECAYS}
            state["in_a_row"] = [torch.zeros_like(gradient) for _ in DECAYS]
        state["newest"].append(gradient.clone())
        for momentum, decay in zip(state["in_a_row"], DECAYS, strict=True):
            momentum.mul_(decay).add_(gradient)
            state["by_decay"][decay].mul_(-decay).add_(gradient)
        momenta = sum(state["in_a_row"]) + sum(state["by_decay"].values())
        return sum(list(state["newest"])) + 0.1 * momenta


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return Nested(model.parameters())


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 1))


experiment = Experiment(
    name="nested_state",
    data=Component(name="toy_data", options={"size": 64}),
    loss="mean_squared_error",
    global_batch_size=16,
    micro_batch=4,
    epochs=2,
)

"""Does a run find out that a resume would lose something? LOSES names what this experiment keeps, and where."""

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from ddp_core import Callback, Component, Experiment
from ddp_core.observe.callback import Moment

LOSES = os.environ.get("LOSES", "nothing")
COUNTS = {"updates": 0}


class Slower(torch.optim.SGD):
    """Makes shorter steps the more it has made."""

    elementwise = True

    def __init__(self, *words: Any, **named: Any) -> None:
        super().__init__(*words, **named)
        self.t = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.t += 1
        COUNTS["updates"] += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] / self.t)


class Remembers(Slower):
    """Keeps its count in its own state_dict."""

    def state_dict(self) -> Any:
        return {**super().state_dict(), "updates": self.t}

    def load_state_dict(self, state_dict: Any) -> None:
        state = dict(state_dict)
        self.t = state.pop("renamed" if LOSES == "what nobody reads" else "updates")
        super().load_state_dict(state)


class Net(nn.Sequential):
    """Keeps what it was given last, which nothing depends on."""

    last: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        self.last = inputs.mean(0)
        return super().forward(inputs)


class CountsOn(Callback):
    """Counts steps, keeps the count in checkpoints, and writes it down in the end."""

    seen = 0

    def on_step(self, moment: Moment) -> None:
        self.seen += 1

    def on_end(self, moment: Moment) -> None:
        (moment.directory / "seen.txt").write_text(str(self.seen))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": object() if LOSES == "what nothing can hold" else self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    if LOSES == "nothing":
        return torch.optim.SGD(model.parameters(), lr=0.1)
    return (Slower if LOSES == "attribute" else Remembers)(model.parameters(), lr=0.1)


def schedule(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 1 / (1 + step))


def model() -> nn.Module:
    return Net(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 1))


callbacks = [CountsOn()]
experiment = Experiment(
    name="loses",
    data=Component(name="toy_data", options={"size": 64}),
    loss="mean_squared_error",
    global_batch_size=16,
    micro_batch=4,
    epochs=2,
)

"""Does a run find out that a resume would lose something? LOSES names what this experiment keeps, and where."""

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from ddp_core import Callback, Component, Experiment
from ddp_core.observe.callback import Moment

LOSES = os.environ.get("LOSES", "nothing")
COUNTS = {"updates": 0, "steps": 0}


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
        parts = {"attribute": self.t, "in its state_dict": self.t, "global of the optimizer": COUNTS["updates"]}
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] / parts.get(LOSES, 1))


class Remembers(Slower):
    """Keeps its count in its own state_dict."""

    def state_dict(self) -> Any:
        return {**super().state_dict(), "updates": self.t}

    def load_state_dict(self, state_dict: Any) -> None:
        state = dict(state_dict)
        self.t = state.pop("renamed" if LOSES == "what nobody reads" else "updates")
        super().load_state_dict(state)


class Jumps(LambdaLR):
    """Takes back what its rule says by a count that its state_dict leaves out."""

    moves = 0

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        self.moves += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + self.moves)

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if name != "moves"}


class Net(nn.Sequential):
    """Scales its answer by the steps that a callback has counted, where LOSES says so."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.count = 0
        self.last: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        if LOSES == "in a cache":
            self.last = inputs.mean(0)
        scales = {"of the model": self.count, "global of the model": COUNTS["steps"]}
        return super().forward(inputs) / (1 + 0.01 * scales.get(LOSES, 0))


class Counts(Callback):
    """Counts steps, and writes down what it has counted."""

    seen = 0

    def on_step(self, moment: Moment) -> None:
        self.seen += 1
        COUNTS["steps"] += 1
        if LOSES != "nothing":
            moment.model.count = moment.step  # type: ignore[assignment]

    def on_end(self, moment: Moment) -> None:
        (moment.directory / "seen.txt").write_text(str(self.seen))


class CountsOn(Counts):
    """Keeps its count in checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": object() if LOSES == "what nothing can hold" else self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    if LOSES == "nothing":
        return torch.optim.SGD(model.parameters(), lr=0.1)
    return (Remembers if LOSES in ("in its state_dict", "what nobody reads") else Slower)(model.parameters(), lr=0.1)


def schedule(optimizer: torch.optim.Optimizer) -> LRScheduler:
    return (Jumps if LOSES == "of the schedule" else LambdaLR)(optimizer, lambda step: 1 / (1 + step))


def model() -> nn.Module:
    return Net(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 1))


callbacks = {"of a callback": [Counts()]}.get(LOSES, [CountsOn()])
experiment = Experiment(
    name="loses",
    data=Component(name="toy_data", options={"size": 64}),
    loss="mean_squared_error",
    global_batch_size=16,
    micro_batch=4,
    epochs=2,
)

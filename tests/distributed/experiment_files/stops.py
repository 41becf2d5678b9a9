"""Does a run that a callback ends early end at the same step, with the same bits, on every layout?

The labels are random, so the test loss gets worse. `--set data.asks=KIND` chooses who asks.
"""

import os
from pathlib import Path

import torch
from torch import nn

from ddp_core import Callback, EarlyStopping, Experiment, InMemory, Optimizer, Splits
from ddp_core.observe.callback import Moment

chosen = {"kind": "patience"}


def data(root: Path, asks: str = "patience") -> Splits:
    chosen["kind"] = asks  # callbacks are made last
    draw = torch.Generator().manual_seed(3)

    def part(count: int) -> InMemory:
        return InMemory(torch.randn(count, 12, generator=draw), torch.randint(0, 5, (count,), generator=draw))

    return Splits(part(64), part(40), 5)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5))


class AtStep(Callback):
    """Asks in the midst of the second epoch, or where a variable says so, which no record holds."""

    def on_step(self, moment: Moment) -> None:
        if moment.step == int(os.environ.get("STOPS_AT", "6")):
            moment.stop("six are\nenough")


class OnRankOne(Callback):
    ranks = "all"

    def on_step(self, moment: Moment) -> None:
        if moment.step == 6 and not moment.is_first:
            moment.stop("rank 1 has had enough")


def callbacks() -> list[Callback]:
    kinds = {"step": AtStep, "rank 1": OnRankOne}
    kind = chosen["kind"]
    return [EarlyStopping("test_loss", patience=2) if kind == "patience" else kinds[kind]()]


experiment = Experiment(
    name="stops",
    loss="cross_entropy",
    global_batch_size=16,
    micro_batch=4,
    epochs=40,
    seed=1,
    optimizer=Optimizer(name="adam", lr=0.02),
)

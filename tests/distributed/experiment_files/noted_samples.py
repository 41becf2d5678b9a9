"""toy_mlp in plain reduction, whose ranks note the samples of each step in `samples-RANK.jsonl` of the run's folder."""

from __future__ import annotations

import json
from typing import Literal

from ddp_core import Callback, Component, Experiment, Moment, Optimizer
from ddp_core.observe.step import StepBatch, StepObserver


class Samples(StepObserver):
    """Sees which samples a rank trains."""

    ids: list[int]

    def before_step(self, batch: StepBatch) -> None:
        self.ids = [number for each in batch.ids for number in each.tolist()]


class Noting(Callback):
    """Writes them down."""

    ranks: Literal["first", "all"] = "all"

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def on_step(self, moment: Moment) -> None:
        with (moment.directory / f"samples-{moment.rank}.jsonl").open("a") as file:
            file.write(json.dumps({"step": moment.step, "epoch": moment.epoch, "ids": self.samples.ids}) + "\n")


def callbacks() -> list[object]:
    samples = Samples()
    return [samples, Noting(samples)]


experiment = Experiment(
    name="noted_samples",
    model=Component(name="two_layer"),
    data=Component(name="toy_data", options={"size": 32, "seed": 0}),
    loss="mean_squared_error",
    optimizer=Optimizer(name="sgd", lr=0.01),
    global_batch_size=16,
    micro_batch=4,
    epochs=2,
    reduction="plain",
)

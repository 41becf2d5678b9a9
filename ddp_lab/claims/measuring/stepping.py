"""This project's own trainers, stepped by hand: so that layouts can be timed in turns within the same processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from ddp_core.base.process import keep_freed_memory
from ddp_core.cli.prepare import load_with_settings
from ddp_core.config.layout import Layout
from ddp_core.config.options import Options
from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.stop import StopRequest
from ddp_core.distributed.world import World
from ddp_core.experiment.request import build_parts
from ddp_core.observe.metrics import Console, MetricsWriter
from ddp_core.trainers import Job, build_trainer

EXPERIMENTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "digits": ("digits", ("epochs=1000", "schedule.name=constant", "schedule.warmup_steps=0")),
    "resnet18": (
        "resnet18_synthetic",
        (
            *("epochs=1000", "model.small_input=true", "data.image_size=32", "data.pool=64", "data.samples=6400"),
            "global_batch_size=16",
        ),
    ),
}
"""Experiments by a short name: the file, and the settings that make steps short and the schedule endless."""


class Stepper:
    """A trainer of one layout; `step` makes its optimizer steps.

    `dp` and `single` live in this process alone; for `ddp` all ranks have to step together. The reduction is plain or
    exact. Without `cut`, every rank or replica takes its share of the global batch at once, as torch's own modules do;
    with it, in the experiment's micro-batches.
    """

    def __init__(
        self,
        name: str,
        layout: Layout,
        settings: Sequence[str] = (),
        reduction: Literal["plain", "exact"] = "plain",
        cut: bool = False,
    ) -> None:
        file, ours = EXPERIMENTS[name]
        loaded = load_with_settings(file, [*ours, *settings])
        if not cut:
            loaded = replace(loaded, experiment=loaded.experiment.model_copy(update={"micro_batch": None}))
        world = World.from_environment()
        device = torch.device(layout.device, world.local_rank) if layout.device == "cuda" else torch.device("cpu")
        if device.type == "cpu":
            keep_freed_memory()
        parts = build_parts(loaded, Path("data"), device)
        collectives = Collectives(world if layout.kind == "ddp" else World(), device)
        trainer = build_trainer(
            Job(
                experiment=loaded.experiment,
                layout=layout,
                options=Options(reduction=reduction),
                parts=replace(parts, callbacks=(), metrics=None),
                collectives=collectives,
                console=Console(rank=1),
                metrics=MetricsWriter(None),
                stop=StopRequest(),
            )
        )
        self.strategy, self._update = trainer.strategy, trainer.loop.update
        self._stream = self.strategy.batches.starting_at(0, trainer.steps.total)

    def step(self, times: int = 1) -> None:
        """Load a batch, compute the gradients and update the weights, `times` times."""
        strategy = self.strategy
        for _ in range(times):
            batch = next(self._stream)
            strategy.compute_gradients(batch)
            strategy.losses.receive(batch)
            strategy.losses.read()
            self._update.make(batch.step)
            strategy.state.step += 1

    def close(self) -> None:
        """End the trainer's threads, and let go of the process group."""
        self._stream.close()
        self.strategy.close()

    def __enter__(self) -> Stepper:
        return self

    def __exit__(self, *details: Any) -> None:
        self.close()

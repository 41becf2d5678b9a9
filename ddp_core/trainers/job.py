"""What a trainer is given: the job, its run, and who is asked whether its bits can be had again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from ddp_core.base.errors import UserError
from ddp_core.checkpoint import Checkpointer
from ddp_core.config.experiment import Experiment
from ddp_core.config.layout import Layout
from ddp_core.config.options import Options
from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.stop import StopRequest
from ddp_core.experiment.building import BuiltExperiment
from ddp_core.observe.metrics import Console, MetricsWriter
from ddp_core.observe.step import StepObserver

Sums = Mapping[str, str]
"""A checksum for each tensor and each number of the state, by its dotted name."""


class Finding(UserError):
    """What a check of all ranks has found: raised on each of them alike, so that all may go on together."""


class Testimony(NamedTuple):
    """What came of a rehearsal or a witness: whether steps that were trained again have the same bits."""

    said: str
    """In words: that the bits are the same, which others there are, or why nothing was found out."""
    differs: bool = False
    seconds: float = 0.0
    """How long it took."""


class Witness(Protocol):
    """Has steps of this run trained again elsewhere; used on rank 0."""

    def ask(self, step: int, noted: Mapping[int, Sums]) -> None:
        """Begin to repeat the steps after the checkpoint of `step`, which have made `noted` of the state."""

    def answer(self, seconds: float) -> Testimony | None:
        """What was found, once that is known within so many seconds."""


@dataclass(frozen=True)
class Trial:
    """What differs in a training that is no run for its own sake: a rehearsal, or steps that a witness repeats."""

    in_miniature: bool = False
    """Whether epochs are cut to a few steps, and a few batches are enough for an evaluation."""
    only_steps: int | None = None
    """The run ends after so many steps, as if they were all. Schedules know the whole run."""
    noted_in: Path | None = None
    """The file in which each rank notes what each step has made of the state; None where nobody compares it."""
    operations_at: int | None = None
    """The step whose operations are noted in files beside it; None: no step's."""


@dataclass(frozen=True)
class RunAccess:
    """What a trainer may do with the directory and the record of its run. The default, for no run, is nothing."""

    directory: Path | None = None
    checkpointer: Checkpointer | None = None
    """Rank 0 alone has a checkpointer, unless the layout saves in parts."""
    kept_every: int | None = None
    """The checkpoints of every so many steps, and the last one, are kept for an audit; None: none of them."""
    note_kept: Callable[[int, Mapping[str, str]], None] | None = None
    """Notes of such a checkpoint the step and the digests of the state (rank 0 alone)."""
    mark_broken: Callable[[int, str], None] | None = None
    """Marks the run's record where the guard goes on after a finding: the step, and what was found (rank 0)."""
    witness: Witness | None = None
    """Trains steps of this run again elsewhere (rank 0); None where nobody could."""
    has_random_data: bool = False
    """Whether the data are known to come out differently at each read, so that nothing can be repeated."""


@dataclass(frozen=True)
class Job:
    """The experiment and what was built from it, the layout, and the objects that print, record and save."""

    experiment: Experiment
    layout: Layout
    options: Options
    parts: BuiltExperiment
    collectives: Collectives
    console: Console
    metrics: MetricsWriter
    stop: StopRequest
    run: RunAccess = field(default_factory=RunAccess)
    trial: Trial = field(default_factory=Trial)
    observers: Sequence[StepObserver] = ()
    """Observers from outside the trainer, in this order. At each moment the trainer's own act first; only what is
    trained is looked at after them, so that a flag `requires_grad` that one of them changed counts from this step on.
    """

    @property
    def device(self) -> torch.device:
        """The device that this process trains on; of several replicas, the first one's."""
        return self.collectives.device

    @property
    def is_exact(self) -> bool:
        """Whether gradients are added up in the canonical sequence, so that all layouts have the same bits."""
        return self.options.reduction == "exact"

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.collectives.world.is_first

    @property
    def is_tried(self) -> bool:
        """Whether this is no run for its own sake."""
        return self.trial.in_miniature or self.trial.only_steps is not None

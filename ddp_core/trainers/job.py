"""What a trainer is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ddp_core.checkpoint import Checkpointer
from ddp_core.config.experiment import Experiment
from ddp_core.config.layout import Layout
from ddp_core.config.options import Options
from ddp_core.data.splits import Splits
from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.stop import StopRequest
from ddp_core.model.losses import Loss
from ddp_core.observe.callback import Callback
from ddp_core.observe.metrics import Console, MetricsWriter
from ddp_core.observe.step import StepObserver
from ddp_core.trainers.own_metrics import OwnMetrics
from ddp_core.trainers.testimony import Witness


@dataclass(frozen=True)
class Job:
    """The experiment and what was built from it, the layout, and the objects that print, record and save."""

    experiment: Experiment
    layout: Layout
    options: Options
    model: nn.Module
    loss: Loss
    splits: Splits
    collectives: Collectives
    device: torch.device
    console: Console
    metrics: MetricsWriter
    stop: StopRequest
    hits: Loss | None = None
    """Counts right answers, for accuracy; None where the experiment has no accuracy."""
    optimizer: torch.optim.Optimizer | None = None
    """Over the model's parameters, on the device; None where the experiment's built-in one is to be made."""
    schedule: LRScheduler | None = None
    """Over the optimizer; None where the experiment's built-in rule sets the rate."""
    own_metrics: OwnMetrics | None = None
    callbacks: Sequence[Callback] = ()
    directory: Path | None = None
    """The run directory, for callbacks; None where none is called."""
    in_miniature: bool = False
    """Whether epochs are cut to a few steps, and a few batches are enough for an evaluation."""
    noted_in: Path | None = None
    """The file in which rank 0 notes what each step has made of the state; None where nothing is compared with it."""
    witness: Witness | None = None
    """Trains steps of this run again elsewhere (rank 0); None where nobody could."""
    only_steps: int | None = None
    """The run ends after so many steps, as if they were all. Schedules know the whole run."""
    checkpointer: Checkpointer | None = None
    """Rank 0 alone has a checkpointer, unless the layout saves in parts."""
    broken: Callable[[int, str], None] | None = None
    """Marks the run's record where the guard goes on after a finding: the step, and what was found (rank 0)."""
    has_random_data: bool = False
    """Whether the data are known to come out differently at each read, so that nothing can be repeated."""
    kept_every: int | None = None
    """The checkpoints of every so many steps, and the last one, are kept for an audit; None: none of them."""
    note_kept: Callable[[int, Mapping[str, str]], None] | None = None
    """Notes of such a checkpoint the step and the digests of the state (rank 0 alone)."""
    makes_room: Callable[[], bool] | None = None
    """Whether all ranks are to leave at the end of the step, to let a new one in; None where none can come."""
    observers: Sequence[StepObserver] = ()
    """Called at the moments of every step, in this order, after the trainer's own observers."""

    @property
    def is_tried(self) -> bool:
        """Whether this is no run for its own sake: a trial, a rehearsal or a witness."""
        return self.in_miniature or self.only_steps is not None

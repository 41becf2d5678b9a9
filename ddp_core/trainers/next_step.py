"""What a run and the process that rehearses its resume both compute of one step, and what they tell each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddp_core.base.digests import checksum
from ddp_core.trainers.train_state import TrainState

if TYPE_CHECKING:
    from ddp_core.trainers.trainer import Trainer


@dataclass(frozen=True)
class Facts:
    """What the run tells the process that rehearses; the gradient goes along as a file."""

    step: int
    """Of the checkpoint: so many updates were made before it."""
    micro_batch: str | None
    """The digest of micro-batch 0 of the step that follows; None where it was not computed."""
    after: dict[str, str]
    """What the update of that step has made of everything, by name."""
    in_background: bool
    """Whether the run goes on meanwhile."""


@dataclass(frozen=True)
class Verdict:
    """What the rehearsal found."""

    failed: str | None = None
    """Why there was none."""
    unread: str | None = None
    """Why the new job could not read the checkpoint."""
    micro_batch_differs: bool = False
    differs: str | None = None
    """The first thing that the update has made another than in the run."""
    attributes: Mapping[str, str] | None = None
    """Those of the new job, when it has read the checkpoint."""
    seconds: float = 0.0

    @property
    def is_same(self) -> bool:
        """Whether a resume goes on as the run did."""
        return not self.micro_batch_differs and self.differs is None and self.unread is None


def sums_after_update(state: TrainState) -> dict[str, str] | None:
    """Checksums of weights, averages and optimizer state, and the learning rates, by names that a message can tell.

    Where something is cut among ranks a collective, and None on all ranks but the first; what is cut of the optimizer's
    state is left out.
    """
    weights = state.ownership.whole_weights()
    if weights is None:
        return None
    named = [name for name, _ in state.model.named_parameters() if name in weights]
    sums = {f"parameter {name}": checksum(weights[name]) for name in named}
    for name, tensor in state.ownership.replicated():
        if name.startswith("the optimizer's "):
            sums[name] = checksum(tensor)
    if state.average is not None:
        sums |= {f"the averaged {name}": checksum(each) for name, each in state.average.module.named_parameters()}
    for number, group in enumerate(state.optimizer.param_groups):
        sums[f"the learning rate of group {number}"] = repr(float(group["lr"]))
    return sums


def micro_batch_digest(trainer: Trainer, step: int, index: int) -> str | None:
    """A digest of loss and gradients of one micro-batch of the step that comes next, computed without a trace.

    All ranks call this together. None where that cannot be had: where a graph replays the work, or where it raises.
    """
    if trainer.options.cuda_graph:
        return None
    try:
        return trainer.computed(step, index).bits
    except Exception:
        return None

"""The ranks compare what all of them have alike: weights, buffers, averages, and optimizer state that is not cut.

Every rank updates its own copy of these, from the same gradients. A callback that changes weights on one rank alone, or
memory that loses a bit, would otherwise be seen only when training has ended, after checkpoints of it were written.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ddp_core.base.digests import fast_digest, first_difference
from ddp_core.base.errors import UserError
from ddp_core.distributed.process_group import Collectives
from ddp_core.trainers.train_state import TrainState


def require_same_state(state: TrainState, collectives: Collectives, when: str, so: str) -> None:
    """Compare the ranks' copies; a collective. `when` is said of a difference, and `so` what comes of it.

    Raises UserError (2) on every rank, naming the first tensor that differs and the ranks where it does.
    """
    if collectives.world.world_size == 1 or collectives.are_alike(fast_digest(replicated(state))):
        return
    if found := first_difference(collectives.gather, replicated(state)):
        raise other_state(found, when, so)


def other_state(found: str, when: str, so: str) -> UserError:
    """The error for what `first_difference` has found; `so` says what comes of it."""
    return UserError(
        f"{when} {found}, so {so}. It was changed on some ranks alone: by a callback, a hook or an "
        "optimizer that does not do the same on every rank, by a forward that changes weights (nn.Embedding with "
        "max_norm), or by a machine that computes wrongly"
    )


def replicated(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """What every rank has a copy of, by names that a message can tell, in one sequence on all ranks."""
    yield from state.ownership.replicated()
    if state.average is not None:
        for name, value in state.average.module.state_dict().items():
            if isinstance(value, Tensor):
                yield f"the averaged {name}", value

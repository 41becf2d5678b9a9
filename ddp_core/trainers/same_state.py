"""The ranks compare what all of them have alike: weights, buffers, averages, and optimizer state that is not cut.

Every rank updates its own copy of these, from the same gradients. A callback that changes weights on one rank alone, or
memory that loses a bit, would otherwise be seen only when training has ended, after checkpoints of it were written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from hashlib import sha256

from torch import Tensor

from ddp_core.base.digests import checksum
from ddp_core.base.errors import UserError
from ddp_core.distributed.process_group import Collectives
from ddp_core.trainers.train_state import TrainState


def require_same_state(state: TrainState, collectives: Collectives, newest: str) -> None:
    """Compare the ranks' copies; a collective. `newest` says what a message tells of the newest checkpoint.

    Raises UserError (2) on every rank, naming the first tensor that differs and the ranks where it does.
    """
    if collectives.world.world_size == 1:
        return
    sums = [(name, checksum(tensor)) for name, tensor in replicated(state)]
    if len(set(collectives.gather(sha256(repr(sums).encode()).hexdigest()))) == 1:
        return
    everyones = [dict(theirs) for theirs in collectives.gather(sums)]
    for name in dict.fromkeys(name for theirs in everyones for name in theirs):
        values = [theirs.get(name) for theirs in everyones]
        usual, count = Counter(values).most_common(1)[0]
        if count < len(values):
            others = [rank for rank, value in enumerate(values) if value != usual] if len(values) > 2 else [0, 1]
            where = f"{', '.join(map(str, others))} of {len(values)}"
            raise UserError(
                f"after step {state.step} {name} is not the same on all ranks (differs: {where}), so this step is not "
                f"saved, {newest}. It was changed on some ranks alone: by a callback, a hook or an optimizer that does "
                "not do the same on every rank, by a forward that changes weights (nn.Embedding with max_norm), or by "
                "a machine that computes wrongly"
            )


def replicated(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """What every rank has a copy of, by names that a message can tell, in one sequence on all ranks."""
    yield from state.ownership.replicated()
    if state.average is not None:
        for name, value in state.average.module.state_dict().items():
            if isinstance(value, Tensor):
                yield f"the averaged {name}", value

"""The memory of one rank, computed from what one watched micro-batch took on a whole replica.

What is cut among ranks (`Sharding`) is divided by their number. Beside it stand, during backward, the activations, the
gradients made so far, and sums of the gradients of earlier micro-batches: as many as the tree of additions needs at a
time. Where each rank keeps a part of the gradients alone, these leave in groups while backward goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from ddp_core.base.seeds import share_of
from ddp_core.config.records import ReductionKind
from ddp_core.reduction.tree import canonical_subtrees
from ddp_core.run.backward import Backward, Leaving
from ddp_core.sharding import Sharding

_WHILE_SENT = 2
"""A group of gradients that is sent counts twice: the parts of other ranks' groups arrive meanwhile."""


@dataclass(frozen=True)
class Way:
    """How the gradients of a step come together."""

    micro_batches: int = 1
    """Of the whole step."""
    reduction: ReductionKind = "exact"
    world_size: int = 1
    sharding: Sharding = Sharding()


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one replica, or of one rank, on one device. `activations` is what forward keeps for one micro-batch."""

    weights: int
    gradients: int
    optimizer_state: int
    inputs: int
    activations: int
    in_backward: int
    """The most that saved tensors, gradients made so far, gradients in flight, sums of earlier micro-batches and
    gathered weights take together."""
    in_update: int
    """All gradients, and the optimizer's temporary tensors."""
    averaged_weights: int = 0
    """The moving average of weights and buffers."""
    communication: int = 0
    """DistributedDataParallel's buckets, a second copy of the gradients, and what arrives from other ranks for them."""
    sums: int = 0
    """The most that sums of earlier micro-batches take, a part of `in_backward`."""
    gathered: int = 0
    """Weights of other ranks that this one holds for a while, a part of `in_backward`."""

    @property
    def peak(self) -> int:
        """Bytes at the moment that needs most: in backward or in the update."""
        return self.standing + max(self.in_backward, self.in_update)

    @property
    def standing(self) -> int:
        """Bytes that live from step to step."""
        return self.weights + self.averaged_weights + self.optimizer_state + self.inputs + self.communication

    def table(self) -> list[tuple[str, int]]:
        """Names and bytes, for people."""
        rows = [
            ("weights", self.weights),
            ("gradients", self.gradients),
            ("optimizer state", self.optimizer_state),
            ("inputs", self.inputs),
            ("activations", self.activations),
        ]
        more = [
            ("sums", self.sums),
            ("gathered weights", self.gathered),
            ("averaged weights", self.averaged_weights),
            ("gradient buckets", self.communication),
        ]
        return rows + [row for row in more if row[1]]


@dataclass(frozen=True)
class Replica:
    """What training takes where nothing is shared with other ranks, in bytes, from one watched micro-batch."""

    weights: int
    """Parameters and buffers."""
    trainable: int
    """The trained parameters; all gradients take as much."""
    optimizer_state: int
    inputs: int
    in_passing: int
    """The optimizer's temporary tensors."""
    averaged: bool
    backward: Backward
    group: int
    """The gradients that ranks send at a time."""
    block: int
    """The largest part of the model whose weights are gathered at a time, where these are sharded."""
    rest: int
    """The weights outside of blocks, which are then gathered for the whole of forward and backward."""
    growth: float
    """The samples of the micro-batch to estimate for, as a multiple of those of the watched one."""

    def estimate(self, way: Way = Way(), bucketed: bool = False) -> MemoryEstimate:
        """The memory of the rank that needs most. `bucketed`: DistributedDataParallel has gradient buckets."""
        sharding, ranks = way.sharding, way.world_size
        of_parameters, of_updates = ranks if sharding.cuts_parameters else 1, ranks if sharding.is_any else 1
        weights = self.weights - self.trainable + _part(self.trainable, of_parameters)
        gradients = _part(self.trainable, of_updates)
        in_backward, sums = self._in_backward(way)
        # The next block is gathered while one computes.
        gathered = self.rest + 2 * self.block if sharding.cuts_parameters else 0
        return MemoryEstimate(
            weights=weights,
            gradients=gradients,
            optimizer_state=_part(self.optimizer_state, of_updates),
            inputs=self.inputs,
            activations=round(self.growth * self.backward.activations),
            in_backward=in_backward + gathered,
            in_update=gradients + min(self.in_passing, 2 * gradients),
            averaged_weights=weights if self.averaged else 0,
            communication=self.trainable + _arriving(way, self.trainable) if bucketed else 0,
            sums=sums,
            gathered=gathered,
        )

    def _in_backward(self, way: Way) -> tuple[int, int]:
        """The most in any backward of a step, on any rank, and the most that sums of earlier micro-batches take."""
        highest, leaves, ranks = partial(self.backward.highest, self.growth), way.micro_batches, way.world_size
        if way.reduction == "plain" and not way.sharding.is_any:
            # Each gradient is added to that of earlier micro-batches as soon as it is made.
            sums = self.trainable if leaves > ranks else 0
            return (sums + highest(leaving=Leaving()), sums) if sums else (highest(), 0)
        if way.sharding.cuts_gradients:
            # Every backward sends its gradients. A rank adds up its part of all that come, W micro-batches at a time.
            group = max(self.block, self.rest) if way.sharding.cuts_parameters else self.group
            held = [len(canonical_subtrees(0, end, leaves)) for end in (*range(0, leaves, ranks), leaves)]
            found = [
                _part(before * self.trainable, ranks)
                + highest(leaving=Leaving(group, _WHILE_SENT, (after - before) / ranks))
                for before, after in pairwise(held)
            ]
            return max(found), _part(max(held) * self.trainable, ranks)
        # A rank adds up neighbouring micro-batches, all of each, and sends the sums in its last backward.
        shares = [share_of(leaves, rank, ranks) for rank in range(ranks)]
        counts = [[len(canonical_subtrees(share.start, index, leaves)) for index in share] for share in shares]
        sums = max(map(max, counts)) * self.trainable
        if not way.sharding.is_any:
            return highest(max(map(max, counts))), sums
        last = Leaving(self.group, _WHILE_SENT, 1 / ranks)
        backwards: set[tuple[int, Leaving | None, int]] = set()
        for share, of_share in zip(shares, counts, strict=True):
            following = [*of_share[1:], len(canonical_subtrees(share.start, share.stop, leaves))]
            for index, count, then in zip(share, of_share, following, strict=True):
                added = count + 1 - then if self.backward.adds_early else 0
                backwards.add((count, last if index == share[-1] else None, added))
        return max(highest(*each) for each in backwards), sums


def _arriving(way: Way, size: int) -> int:
    """What arrives while all buckets are under way: from every other rank, a part of each of its sums.

    Of two ranks with one sum each, all of it: they save a round so (ddp_core/reduction/one_level.py). What plain sums
    take is not known here.
    """
    if way.reduction == "plain":
        return 0
    leaves, ranks = way.micro_batches, way.world_size
    shares = [share_of(leaves, rank, ranks) for rank in range(ranks)]
    most = max(len(canonical_subtrees(share.start, share.stop, leaves)) for share in shares)
    return size if ranks == 2 and most == 1 else most * (ranks - 1) * _part(size, ranks)


def _part(size: int, ranks: int) -> int:
    return -(-size // ranks)

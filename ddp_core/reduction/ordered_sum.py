"""The sum over all ranks in the order of the canonical tree, at the volume of a ring all-reduce.

1. Cut the N elements into W chunks; rank r sums chunk r.
2. Every rank sends chunk c of each of its subtrees to rank c: (W-1)/W * N elements where the share is one subtree.
3. Rank c adds the subtrees of chunk c in tree order.
4. Every rank sends its finished chunk to all others: (W-1)/W * N elements.

A chunk is a rank's part (`parts`). On several nodes of one size, both ways go in two levels. Small tensors, and all
tensors between two ranks with one subtree each (which send no more by it), take one round: every rank sends its
subtrees to all others and adds up everything itself.

Each element sees the same additions wherever chunk, bucket and node borders lie, and whichever backend carries it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .parts import Parts, are_whole, parts_on
from .tree import Plan, plan_for


def sum_parts(parts: Parts, own: Sequence[Tensor], out: Tensor, plan: Plan) -> Iterator[None]:
    """Sum the ranks' flat subtrees `own` into `out`, which may be one of them, in phases; `own` is overwritten.

    Raises RuntimeError when a peer is gone or silent for the group's timeout.
    """
    cuts = parts.cuts(out.numel(), out.dtype, max(map(len, plan.spans)))
    yield from parts.fold(own, out, plan, cuts, out[cuts[parts.rank]])
    if not are_whole(cuts):
        parts.gather([(out, cuts)])


class OrderedSum:
    """The ordered sum on one process group: chooses the exchange by backend, and one level or two by `nodes`.

    `nodes` are the group's ranks, node by node; None: in one level. `parts`: in which proportion a step is dealt to the
    ranks (see `share_of`); empty: in equal shares. Collective: every rank of `group` calls it in the same order with
    tensors of the same size and dtype. One thread only, except that phases of several sums (`phases`) may run on a
    thread each.
    """

    PHASES = 3
    """So many phases, each of another sum, may run at the same time; what follows belongs to the last."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        nodes: Sequence[Sequence[int]] | None = None,
        parts: tuple[int, ...] = (),
    ) -> None:
        self._group = group
        self.rank, self.world_size = (group.rank(), group.size()) if group is not None else (0, 1)
        self.parts = parts
        self.groups = groups_of(nodes or ())
        """The ranks that add up among themselves first, where that is done in two levels."""
        self._by_device: dict[str, Parts] = {}

    def __call__(self, own: Sequence[Tensor], out: Tensor, micro_batches: int) -> None:
        """Sum all ranks' subtrees over `micro_batches` leaves into `out`.

        `own` holds one flat tensor per span of `canonical_subtrees(share)`; they are overwritten, and `out` may be one.
        """
        for _ in self.phases(own, out, micro_batches):
            pass

    def phases(self, own: Sequence[Tensor], out: Tensor, micro_batches: int) -> Iterator[None]:
        """The sum, in phases that may run at the same time as other phases of the next sums.

        Every rank must run each phase of one sum before the same phase of the next.
        """
        plan = plan_for(micro_batches, self.parts or self.world_size)
        if len(own) != len(plan.spans[self.rank]):
            raise ValueError(f"rank {self.rank} owns the subtrees {plan.spans[self.rank]}, got {len(own)} tensors")
        if out.numel():
            yield from sum_parts(self.parts_on(out.device), own, out, plan)

    def parts_on(self, device: torch.device) -> Parts:
        """The parts that tensors on `device` are summed in; a collective where it is called for the first time."""
        if device.type not in self._by_device:
            self._by_device[device.type] = parts_on(self._group, self.groups, device)
        return self._by_device[device.type]


def groups_of(nodes: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The ranks that add up among themselves first: the nodes, all ranks node by node; () where one level is enough."""
    return tuple(map(tuple, nodes)) if 1 < len(nodes) < sum(map(len, nodes)) else ()

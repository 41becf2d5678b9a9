"""The sum over all ranks in the order of the canonical tree, at the volume of a ring all-reduce.

1. Cut the N elements into W chunks; rank r sums chunk r.
2. Every rank sends chunk c of each of its subtrees to rank c: (W-1)/W * N elements where the share is one subtree.
3. Rank c adds the subtrees of chunk c in tree order.
4. Every rank sends its finished chunk to all others: (W-1)/W * N elements.

On several nodes, whose ranks share a link, and between many ranks the same in two levels (`levels`). Each element sees
the same additions wherever chunk, bucket and node borders lie, and whichever backend carries it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import Tensor

from .exchange import WholeExchange
from .exchange_choice import exchange_on
from .levels import TwoLevels, groups_of
from .one_level import sum_in_one_level
from .plan import plan_for


class OrderedSum:
    """The ordered sum on one process group: chooses the exchange by backend, and one level or two by `nodes`.

    `nodes` are the group's ranks, node by node; None: in one level. Collective: every rank of `group` calls it in the
    same order with tensors of the same size and dtype. One thread only, but for `phases`.
    """

    PHASES = 3
    """The most phases that a sum has."""

    def __init__(self, group: dist.ProcessGroup | None, nodes: Sequence[Sequence[int]] | None = None) -> None:
        self._group = group
        self.groups = groups_of(nodes or ())
        """The ranks that add up among themselves first, where that is done in two levels."""
        self._exchanges: dict[str, tuple[WholeExchange, TwoLevels | None]] = {}

    @property
    def rank(self) -> int:
        """This process in the group; 0 without one."""
        return self._group.rank() if self._group is not None else 0

    @property
    def world_size(self) -> int:
        """Processes in the group; 1 without one."""
        return self._group.size() if self._group is not None else 1

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
        plan = plan_for(micro_batches, self.world_size)
        if len(own) != len(plan.spans[self.rank]):
            raise ValueError(f"rank {self.rank} owns the subtrees {plan.spans[self.rank]}, got {len(own)} tensors")
        if self._group is None or self.world_size == 1:
            plan.add_([(flat, None) for flat in own], out)
        elif out.numel():
            device = out.device
            if device.type not in self._exchanges:
                flat, levels = exchange_on(self._group, device), None
                if self.groups:
                    # NCCL connects ranks in the first collective of all; after that some may send to each other.
                    cuts = [slice(rank, rank + 1) for rank in range(self.world_size)]
                    flat.gather([(out.new_zeros(self.world_size), cuts)])
                    levels = TwoLevels(self._group, self.groups, device)
                self._exchanges[device.type] = flat, levels
            flat, levels = self._exchanges[device.type]
            if levels is None or levels.cost_of_one_round(out) <= flat.one_round_bytes:
                sum_in_one_level(flat, own, out, plan)
            else:
                yield from levels.phases(own, out, micro_batches)

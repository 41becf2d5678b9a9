"""The sum over all ranks in the order of the canonical tree, at the volume of a ring all-reduce.

1. Cut the N elements into W chunks; rank r sums chunk r.
2. Every rank sends chunk c of each of its subtrees to rank c: (W-1)/W * N elements where the share is one subtree.
3. Rank c adds the subtrees of chunk c in tree order.
4. Every rank sends its finished chunk to all others: (W-1)/W * N elements.

Each element sees the same additions wherever chunk and bucket borders lie, and whichever backend carries it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from .exchange import Exchange, exchange_on
from .plan import plan_for


class OrderedSum:
    """The ordered sum on one process group: chooses the exchange by backend.

    Collective: every rank of `group` calls it in the same order with tensors of the same size and dtype. One thread
    only.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._exchanges: dict[str, Exchange] = {}

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
        plan = plan_for(micro_batches, self.world_size)
        if len(own) != len(plan.spans[self.rank]):
            raise ValueError(f"rank {self.rank} owns the subtrees {plan.spans[self.rank]}, got {len(own)} tensors")
        if self._group is None or self.world_size == 1:
            plan.add_([(flat, None) for flat in own], out)
        elif out.numel():
            device = out.device
            if device.type not in self._exchanges:
                self._exchanges[device.type] = exchange_on(self._group, device)
            self._exchanges[device.type].sum_(own, out, plan)

"""The ordered sum between members that are all alike: each adds up one chunk, and sends it to the others.

A member is a rank, or a node where nodes add up in a second level. A `Plan` says who brings which subtrees and in which
order they are added; an `Exchange` carries them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ddp_core.base.seeds import share_of

from .exchange import Arrival, Exchange, cut, wait_for
from .tree import Span, are_siblings, canonical_subtrees

_PIECE_ELEMENTS = 1024 * 1024
"""A piece stays in a core's cache between its arrival and its addition, and is large enough for few messages."""


class Plan:
    """The order of additions where several members each bring subtrees of one tree over `leaves` leaves.

    `spans` are each member's subtrees; `rest` are those that are left when all siblings have been added, from left to
    right in the tree: the whole of it, or what a part of the members can add up among themselves.
    """

    def __init__(self, leaves: int, spans: Sequence[Sequence[Span]]) -> None:
        self.leaves, self.spans = leaves, spans
        flat = [span for member in spans for span in member]
        # The members' subtrees, one member after the other, from left to right in the tree.
        self._order = sorted(range(len(flat)), key=flat.__getitem__)
        # For each subtree in that order: how many additions its arrival makes possible.
        self._merges: list[int] = []
        self.rest: list[Span] = []
        for position in self._order:
            self.rest.append(flat[position])
            self._merges.append(0)
            while len(self.rest) > 1 and are_siblings(self.rest[-2], self.rest[-1], leaves):
                right, left = self.rest.pop(), self.rest.pop()
                self.rest.append(Span(left.first, right.stop))
                self._merges[-1] += 1

    def add_(self, arrivals: Sequence[Arrival], out: Tensor) -> None:
        """Add up the whole tree as `fold_` does, into `out`, which may be one of the tensors."""
        (root,) = self.fold_(arrivals, out)
        if root.data_ptr() != out.data_ptr():
            out.copy_(root)

    def fold_(self, arrivals: Sequence[Arrival], out: Tensor | None = None) -> list[Tensor]:
        """Add the members' subtrees, each once its work is done; return those of `rest`. The tensors are overwritten.

        `arrivals` are the subtrees of the first member, then those of the second, and so on. The last addition is made
        into `out` if that is given.
        """
        stack: list[Tensor] = []
        additions = sum(self._merges)
        for position, merges in zip(self._order, self._merges, strict=True):
            tensor, work = arrivals[position]
            if work is not None:
                work.wait()
            stack.append(tensor)
            for _ in range(merges):
                right, left = stack.pop(), stack.pop()
                additions -= 1
                stack.append(torch.add(left, right, out=left if additions or out is None else out))
        return stack


@functools.lru_cache(maxsize=64)
def plan_for(micro_batches: int, parts: int | tuple[int, ...]) -> Plan:
    """The plan of a step in which each rank brings the subtrees of its contiguous share (`share_of`); made once."""
    shares = [share_of(micro_batches, rank, parts) for rank in range(parts if isinstance(parts, int) else len(parts))]
    return Plan(micro_batches, [canonical_subtrees(share.start, share.stop, micro_batches) for share in shares])


def sum_in_one_level(exchange: Exchange, own: Sequence[Tensor], out: Tensor, plan: Plan) -> None:
    """Sum the members' flat subtrees `own` into `out`, which may be one of them; `own` is overwritten.

    Small tensors, and all tensors between two members with one subtree each (which send no more by it), take one round:
    every member sends its subtrees to all others and adds up everything itself, one piece while the next ones arrive.
    Raises RuntimeError when a peer is gone or silent for the group's timeout.
    """
    members, elements = exchange.world_size, out.numel()
    counts = [len(spans) for spans in plan.spans]
    # A member with c subtrees sends c * (W-1) * N elements in one round, (c + 1) * (W-1)/W * N in two.
    extra_elements = (members - 1) * (max(counts) - (max(counts) + 1) / members) * elements
    if extra_elements * out.element_size() <= exchange.one_round_bytes:
        pieces = cut(elements, -(-elements // _PIECE_ELEMENTS), out.dtype)
        on_their_way = [exchange.collect(own, out, counts, [piece] * members) for piece in pieces]
        for piece, collected in zip(pieces, on_their_way, strict=True):
            wait_for(collected.sent)
            plan.add_(collected.arrivals, out[piece])
            collected.end()
    else:
        cuts = cut(elements, members, out.dtype)
        collected = exchange.collect(own, out, counts, cuts)
        plan.add_(collected.arrivals, out[cuts[exchange.rank]])
        # Others' sums arrive where own tensors may lie.
        wait_for(collected.sent)
        collected.end()
        exchange.gather([(out, cuts)])

"""The canonical tree: one fixed order of additions over M micro-batch gradients, whichever ranks compute them.

Write the leaves 0 … M-1 under the perfect binary tree over the next power of two, and leave out the leaves that do not
exist. Every node is then an aligned block `[k * 2**j, (k + 1) * 2**j)` cut off at M, and its sum is *left child + right
child*. A contiguous range of leaves consists of a few whole nodes, so the rank that owns it can add those up alone; the
rest of the tree is added where the nodes of several ranks come together. `a + b` and `b + a` have the same bits, so it
does not matter which operand is overwritten. It matters which two are added: that is what the tree fixes.

The stack of partial sums is the binary counter of Knuth (The Art of Computer Programming 4A, 7.1.3) and of pairwise
summation (Higham, The accuracy of floating point summation, 1993).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_core.base.seeds import share_of
from ddp_core.base.torch_internals import foreach_add_

from .exchange import Arrival


class Span(NamedTuple):
    """The leaves `first … stop-1` under one node of the tree."""

    first: int
    stop: int


@dataclass
class Subtree:
    """A node of the tree and its sum: one tensor per parameter, None where no leaf of the node has a gradient."""

    span: Span
    tensors: list[Tensor | None]


def canonical_subtrees(first: int, stop: int, leaves: int) -> list[Span]:
    """Return the maximal nodes of the tree over `leaves` leaves that make up `[first, stop)`, left to right."""
    if not 0 <= first <= stop <= leaves:
        raise ValueError(f"[{first}, {stop}) is not a range of the {leaves} leaves")
    spans = []
    while first < stop:
        size = first & -first or 1 << (leaves - 1).bit_length()
        while min(first + size, leaves) > stop:
            size //= 2
        spans.append(Span(first, min(first + size, leaves)))
        first += size
    return spans


def are_siblings(left: Span, right: Span, leaves: int) -> bool:
    """Say whether two nodes of the tree over `leaves` leaves are the children of one node."""
    size = left.stop - left.first
    parent_stop = min(left.first + 2 * size, leaves)
    return size & (size - 1) == 0 and left.first % (2 * size) == 0 and (left.stop, parent_stop) == right


def add_(left: list[Tensor | None], right: Sequence[Tensor | None]) -> None:
    """Add `right` to `left` in place, tensor by tensor; a tensor of `right` may end up in `left`.

    None changes nothing. It stands for -0.0, the only number that changes no other number when added: -0.0 + 0.0 would
    be +0.0.
    """
    pairs: list[tuple[Tensor, Tensor]] = []
    for position, (ours, theirs) in enumerate(zip(left, right, strict=True)):
        if ours is not None and theirs is not None:
            pairs.append((ours, theirs.to(ours.device)))
        elif theirs is not None:
            left[position] = theirs
    if pairs:
        foreach_add_([ours for ours, _ in pairs], [theirs for _, theirs in pairs])


class GradientTree:
    """A binary counter over a contiguous range of micro-batches: push gradients in order, keep few partial sums.

    `GradientTree(8)` is the whole tree over 8 micro-batches, `GradientTree(8, 2, 5)` the part over micro-batches 2,
    3, 4. At most `log2(n) + 1` sums are alive for an aligned range of n leaves (`2 * log2(n)` otherwise), each as
    large as a leaf. Raises ValueError for a range outside the tree and for one leaf too many.
    """

    def __init__(self, leaves: int, first: int = 0, stop: int | None = None) -> None:
        self.leaves = leaves
        self.span = Span(first, leaves if stop is None else stop)
        if leaves < 1 or not 0 <= first <= self.span.stop <= leaves:
            raise ValueError(f"[{first}, {self.span.stop}) is not a range of {leaves} micro-batches")
        self.next_leaf = first
        self.subtrees: list[Subtree] = []

    @property
    def complete(self) -> bool:
        """Whether every leaf of the range has been pushed."""
        return self.next_leaf == self.span.stop

    @property
    def last_leaf(self) -> Span:
        """The last leaf of the range."""
        return Span(self.span.stop - 1, self.span.stop)

    def push(self, tensors: Sequence[Tensor | None]) -> None:
        """Take the gradients of the next micro-batch; they belong to the tree from now on and will be overwritten."""
        if self.complete:
            raise ValueError(f"all micro-batches of {self.span} have been pushed already")
        leaf = Subtree(Span(self.next_leaf, self.next_leaf + 1), list(tensors))
        self.next_leaf += 1
        self.subtrees.append(leaf)
        merge_(self.subtrees, self.leaves)


def merge_(stack: list[Subtree], leaves: int) -> None:
    """Add the last two subtrees of `stack` while they are siblings."""
    while len(stack) > 1 and are_siblings(stack[-2].span, stack[-1].span, leaves):
        right = stack.pop()
        left = stack[-1]
        add_(left.tensors, right.tensors)
        left.span = Span(left.span.first, right.span.stop)


def fold(subtrees: Iterable[Subtree], leaves: int) -> list[Subtree]:
    """Complete the tree from subtrees of several ranks, overwriting them; if they cover it, only the root is left.

    Raises ValueError if two subtrees overlap.
    """
    stack: list[Subtree] = []
    end = 0
    for subtree in sorted(subtrees, key=lambda subtree: subtree.span):
        if subtree.span.first < end:
            raise ValueError(f"{subtree.span} is covered twice")
        end = subtree.span.stop
        stack.append(subtree)
        merge_(stack, leaves)
    return stack


def fold_replicas(trees: Iterable[GradientTree]) -> list[Tensor | None]:
    """Return the sum over all micro-batches from the trees of the replicas in one process, overwriting them.

    Each tensor of the sum lies on the device of the first replica that has it. Raises ValueError if the trees are not
    the whole of one tree.
    """
    trees = list(trees)
    leaves = trees[0].leaves
    roots = fold((subtree for tree in trees for subtree in tree.subtrees), leaves)
    if any(tree.leaves != leaves for tree in trees) or [root.span for root in roots] != [Span(0, leaves)]:
        raise ValueError(f"{[root.span for root in roots]} is not the whole tree over {leaves} micro-batches")
    return roots[0].tensors


class Plan:
    """The order of additions where several members each bring subtrees of one tree over `leaves` leaves.

    A member is a rank, or a node where nodes add up in a second level. `spans` are each member's subtrees; `rest` are
    those that are left when all siblings have been added, from left to right in the tree: the whole of it, or what a
    part of the members can add up among themselves.
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

    def add_(self, arrivals: Sequence[Arrival], outs: Sequence[Tensor]) -> None:
        """As `fold_`, into `outs`: one for each of `rest`. A single one may be one of the tensors."""
        sums = self.fold_(arrivals, outs[0] if len(outs) == 1 else None)
        for out, found in zip(outs, sums, strict=True):
            if found.data_ptr() != out.data_ptr():
                out.copy_(found)


@functools.lru_cache(maxsize=64)
def plan_for(micro_batches: int, parts: int | tuple[int, ...]) -> Plan:
    """The plan of a step in which each rank brings the subtrees of its contiguous share (`share_of`); made once."""
    shares = [share_of(micro_batches, rank, parts) for rank in range(parts if isinstance(parts, int) else len(parts))]
    return Plan(micro_batches, [canonical_subtrees(share.start, share.stop, micro_batches) for share in shares])


@functools.lru_cache(maxsize=256)
def in_two_levels(plan: Plan, nodes: tuple[tuple[int, ...], ...]) -> tuple[list[Plan], Plan]:
    """The plan of each node, given by its ranks, and the plan across the nodes for what is left then; made once."""
    within_nodes = [Plan(plan.leaves, [plan.spans[rank] for rank in members]) for members in nodes]
    return within_nodes, Plan(plan.leaves, [node.rest for node in within_nodes])

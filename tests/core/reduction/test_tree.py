"""The canonical tree of additions: shares, subtrees, missing gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddp_core.base.digests import same_bits
from ddp_core.base.seeds import share_of
from ddp_core.reduction import GradientTree, Span, canonical_subtrees, fold, fold_replicas
from ddp_core.reduction.tree import Plan, plan_for
from tests.support.wording import refusing

quick = settings(deadline=None, max_examples=60)


def by_definition(leaves: list[Tensor]) -> Tensor:
    """The sum by definition of the tree: its left part has the largest power of two below the number of leaves."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << ((len(leaves) - 1).bit_length() - 1)
    return by_definition(leaves[:half]) + by_definition(leaves[half:])


def random_leaves(micro_batches: int, elements: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scales = 10.0 ** torch.randint(-4, 5, (micro_batches, 1), generator=generator)
    return list(torch.randn(micro_batches, elements, generator=generator) * scales)


def trees_of(leaves: Sequence[Tensor | None], world_size: int) -> list[GradientTree]:
    trees = []
    for rank in range(world_size):
        own = share_of(len(leaves), rank, world_size)
        tree = GradientTree(len(leaves), own.start, own.stop)
        for index in own:
            leaf = leaves[index]
            tree.push([None if leaf is None else leaf.clone()])
            assert len(tree.subtrees) <= 2 * math.log2(len(own)) + 1
        trees.append(tree)
    return trees


@quick
@given(st.integers(1, 70), st.data())
def test_shares_are_contiguous_and_cover_all_micro_batches(micro_batches: int, data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, micro_batches))
    shares = [share_of(micro_batches, rank, world_size) for rank in range(world_size)]
    assert [index for own in shares for index in own] == list(range(micro_batches))
    assert {len(own) for own in shares} <= {micro_batches // world_size, micro_batches // world_size + 1}


@quick
@given(st.integers(1, 70), st.data())
def test_any_cut_of_the_leaves_gives_the_bits_of_the_definition(micro_batches: int, data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, micro_batches))
    leaves = random_leaves(micro_batches, data.draw(st.sampled_from([1, 3, 17, 64])), data.draw(st.integers(0, 999)))
    (total,) = fold_replicas(trees_of(leaves, world_size))
    assert torch.equal(total, by_definition(leaves))

    # Higham 1993: |error| <= depth * u / (1 - depth * u) * sum |x|, with u half an ulp of float32.
    depth, unit = math.ceil(math.log2(micro_batches)), 2.0**-24
    exactly = torch.stack(leaves).double()
    bound = depth * unit / (1 - depth * unit) * exactly.abs().sum(0)
    assert ((total.double() - exactly.sum(0)).abs() <= bound + 1e-300).all()


@quick
@given(st.integers(1, 200), st.data())
def test_a_range_is_cut_into_few_whole_nodes(micro_batches: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, micro_batches))
    stop = data.draw(st.integers(first, micro_batches))
    spans = canonical_subtrees(first, stop, micro_batches)
    assert [leaf for span in spans for leaf in range(*span)] == list(range(first, stop))
    assert len(spans) <= 2 * math.log2(max(2, stop - first))
    tree = GradientTree(micro_batches, first, stop)
    assert tree.span == (first, stop)
    for leaf in range(first, stop):
        tree.push([torch.tensor([float(leaf)])])
    assert [subtree.span for subtree in tree.subtrees] == spans
    assert [subtree.tensors[0] for subtree in tree.subtrees] == [torch.tensor([float(sum(range(*s)))]) for s in spans]


def test_the_plan_of_an_aligned_step_sends_one_subtree_a_rank() -> None:
    assert plan_for(8, 4).spans == [[Span(0, 2)], [Span(2, 4)], [Span(4, 6)], [Span(6, 8)]]
    assert plan_for(8, 3).spans == [[Span(0, 2)], [Span(2, 4), Span(4, 5)], [Span(5, 6), Span(6, 8)]]
    assert plan_for(2, 3).spans == [[], [Span(0, 1)], [Span(1, 2)]]


@quick
@given(st.integers(1, 24), st.data())
def test_subtrees_are_added_in_the_order_of_the_tree_not_in_that_of_their_arrival(
    micro_batches: int, data: st.DataObject
) -> None:
    leaves = random_leaves(micro_batches, 5, data.draw(st.integers(0, 999)))
    trees = trees_of(leaves, data.draw(st.integers(1, micro_batches)))
    members = [[(each.span, each.tensors[0].clone()) for each in tree.subtrees] for tree in trees]
    (root,) = fold(data.draw(st.permutations([each for tree in trees for each in tree.subtrees])), micro_batches)
    assert torch.equal(root.tensors[0], by_definition(leaves))

    # The members of a sum may also come in any order: on several nodes, ranks are dealt as the launcher likes.
    members = data.draw(st.permutations(members))
    plan = Plan(micro_batches, [[span for span, _ in member] for member in members])
    arrivals = [Late(tensor).arrival for member in members for _, tensor in member]
    out = torch.full((5,), torch.nan)
    plan.add_(arrivals, [out])
    assert plan.rest == [Span(0, micro_batches)]
    assert torch.equal(out, by_definition(leaves))


class Late:
    """A tensor whose numbers are there only after `wait`."""

    def __init__(self, tensor: Tensor) -> None:
        self.numbers, self.arrival = tensor, (torch.full_like(tensor, torch.nan), self)

    def wait(self) -> None:
        self.arrival[0].copy_(self.numbers)


def test_a_missing_gradient_adds_nothing_wherever_it_is() -> None:
    for values in itertools.product([None, -0.0, 1e-8], repeat=4):
        leaves = [None if value is None else torch.tensor([value]) for value in values]
        written_out = by_definition([torch.tensor([-0.0]) if leaf is None else leaf for leaf in leaves])
        for world_size in range(1, 5):
            (total,) = fold_replicas(trees_of(leaves, world_size))
            assert same_bits(total, written_out) if any(leaf is not None for leaf in leaves) else total is None


def test_the_tree_refuses_what_does_not_fit() -> None:
    tree = GradientTree(2)
    tree.push([torch.ones(1)])
    wrong: list[Callable[[], object]] = [
        lambda: fold_replicas([tree]),
        lambda: fold([*tree.subtrees, *tree.subtrees], 2),
        lambda: (tree.push([torch.ones(1)]), tree.push([torch.ones(1)])),
        lambda: GradientTree(4, 2, 5),
        lambda: canonical_subtrees(0, 3, 2),
    ]
    for action in wrong:
        with refusing(ValueError):
            action()

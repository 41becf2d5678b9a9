"""Gradients added to earlier sums while backward makes them: the tree's own bits, and no gradient added to twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ddp_core.reduction import GradientTree, take_gradients
from ddp_core.sharding.early_additions import EarlyAdditions


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 3))


def total(leaves: int, is_early: bool) -> list[Tensor | None]:
    """The sum of the gradients of some micro-batches; the last layer is used in every third one alone."""
    module, tree = net(), GradientTree(leaves)
    parameters = list(module.parameters())
    additions = EarlyAdditions(parameters) if is_early else None
    for leaf in range(leaves):
        if additions is not None:
            additions.begin(tree)
        rows = module[:3](torch.randn(4, 5, generator=torch.Generator().manual_seed(leaf)) * 1.7**leaf)
        (rows if leaf % 3 else module[3](rows)).sum().backward()
        tree.push(take_gradients(parameters))
    if additions is not None:
        additions.close()
    (root,) = tree.subtrees
    return root.tensors


@pytest.mark.parametrize("leaves", [1, 2, 3, 7, 8, 13])
def test_early_additions_are_those_of_the_tree(leaves: int) -> None:
    for early, late in zip(total(leaves, True), total(leaves, False), strict=True):
        assert early is not None
        assert torch.equal(early, late)


def test_earlier_sums_are_let_go_of_as_they_are_added() -> None:
    module, tree = net(), GradientTree(4)
    parameters = list(module.parameters())
    additions = EarlyAdditions(parameters)
    for leaf in range(4):
        additions.begin(tree)
        module(torch.randn(4, 5)).sum().backward()
        waiting = sum(tensor is not None for subtree in tree.subtrees for tensor in subtree.tensors)
        assert waiting == (0 if leaf in (0, 1, 3) else len(parameters))
        tree.push(take_gradients(parameters))


def test_a_gradient_that_is_added_to_again_is_refused() -> None:
    module, tree = net(), GradientTree(2)
    additions = EarlyAdditions(list(module.parameters()))
    tree.push(take_gradients(module.parameters()))
    additions.begin(tree)
    module(torch.randn(4, 5)).sum().backward()
    with pytest.raises(RuntimeError, match="got gradients twice in one backward"):
        module(torch.randn(4, 5)).sum().backward()

"""Trees of tensors: every container keeps its type, and a difference between two trees is named by its place."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_core.data.trees import map_tensors, structure_difference, tensors_of

Point = namedtuple("Point", ["x", "y"])
ONE, TWO = torch.ones(1), torch.full((2,), 2.0)


@pytest.mark.parametrize(
    "tree",
    [
        ONE,
        [ONE, TWO],
        (ONE, (TWO, [])),
        {"a": ONE, "b": {"c": [TWO]}},
        OrderedDict(b=TWO, a=ONE),
        UserDict({"a": ONE}),
        Point(ONE, [TWO]),
        torch.max(torch.eye(2), dim=1),
        ["text", None, 7, ONE],
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_containers_and_other_leaves_stay_as_they_are(tree: Any) -> None:
    moved = map_tensors(Tensor.clone, tree)
    assert type(moved) is type(tree)
    assert str(moved) == str(tree)
    ours, theirs = list(tensors_of(moved)), list(tensors_of(tree))
    assert ours
    assert all(torch.equal(one, other) and one is not other for one, other in zip(ours, theirs, strict=True))


def test_a_dictionary_that_is_not_made_from_one_becomes_plain() -> None:
    assert map_tensors(Tensor.clone, defaultdict(list, a=ONE)) == {"a": ONE}


def test_trees_of_one_structure_are_walked_together() -> None:
    joined = map_tensors(lambda *parts: torch.cat(parts), {"a": [ONE, TWO]}, {"a": [TWO, TWO]}, {"a": [ONE, ONE]})
    assert [len(tensor) for tensor in joined["a"]] == [4, 5]


@pytest.mark.parametrize(
    ("tree", "other", "words"),
    [
        (ONE, 7, None),
        ({"a": ONE, "b": [TWO]}, {"b": (ONE,), "a": TWO}, None),
        ({"a": ONE}, {"a": ONE, "b": ONE}, "here is a dict with the keys a and a dict with the keys a, b"),
        ({"a": [{}, ONE]}, {"a": [{}, ONE, TWO]}, "here['a'] is a list of 2 and a list of 3"),
        ((ONE, {"a": ONE}), (ONE, ONE), "here[1] is a dict with the keys a and a Tensor"),
    ],
)
def test_a_difference_is_named_by_its_place(tree: Any, other: Any, words: str | None) -> None:
    assert structure_difference(tree, other, "here") == words

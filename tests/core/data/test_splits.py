"""What a data builder may return: splits, torch's and torchvision's data sets, a pair of them; and what it may not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset, random_split

from ddp_core.data.loader import Loader
from ddp_core.data.splits import InMemory, Splits, as_splits, weights_of
from tests.support.wording import refusing

TENSORS = TensorDataset(torch.arange(20.0).view(10, 2), torch.arange(10))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    "dataset",
    [
        TENSORS,
        Subset(TENSORS, range(10)),
        ConcatDataset([Subset(TENSORS, range(4)), Subset(TENSORS, range(4, 10))]),
        InMemory(*TENSORS.tensors),
    ],
    ids=lambda dataset: type(dataset).__name__,
)
def test_the_common_data_sets_work_alone(dataset: Any) -> None:
    splits = as_splits(dataset, "data mine")
    assert splits == Splits(dataset)
    inputs, targets = Loader(splits.train).fetch(0, np.array([7, 2]))
    assert inputs.tolist() == [[14.0, 15.0], [4.0, 5.0]]
    assert targets.tolist() == [7, 2]


def test_a_pair_is_training_and_held_out_samples() -> None:
    halves = random_split(TENSORS, [0.5, 0.5], torch.Generator().manual_seed(0))
    assert as_splits(halves, "data mine") == Splits(halves[0], halves[1])
    assert as_splits((TENSORS, None), "data mine") == Splits(TENSORS)


@pytest.mark.parametrize(
    "built",
    [
        Stream(),
        Splits(TENSORS, Stream()),
        iter([1, 2]),
        DataLoader(TENSORS),
        NoLength(),
        7,
        random_split(TENSORS, [4, 3, 3]),
        {"train": TENSORS},
    ],
    ids=lambda value: type(value).__name__,
)
def test_anything_else_is_refused_in_one_line(built: Any) -> None:
    with refusing():
        as_splits(built, "data mine")


def test_weights_are_one_whole_number_for_each_sample() -> None:
    found = weights_of([0, 3, 1], 3, "weights")
    assert found is not None
    assert (found.tolist(), weights_of(None, 3, "weights")) == ([0, 3, 1], None)
    for given in ([1, 2], [1, 2, -1], [0.5, 1, 1], [0, 0, 0], np.array([2**63, 1, 1], np.uint64)):
        with refusing():
            weights_of(given, 3, "weights")  # type: ignore[arg-type]

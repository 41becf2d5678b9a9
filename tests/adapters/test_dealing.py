"""How samples are dealt in other people's loops; needs none of their packages."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ddp_core.adapters.dealing import DealtBatches, WholeSteps, accumulation_steps, deal
from ddp_core.base.errors import UserError
from ddp_core.sampler import GlobalOrder
from tests.support.processes import ask
from tests.support.wording import refusing

DATA = TensorDataset(torch.arange(100))


def dealt(ranks: int, shuffle: bool, epoch: int = 0) -> list[list[list[int]]]:
    """The batches of each rank, of a loader with micro-batches of five samples, six to a step."""
    loaders = [deal(DataLoader(DATA, 5, shuffle=shuffle), 6, 0, rank, ranks) for rank in range(ranks)]
    for loader in loaders:
        assert isinstance(loader.batch_sampler, DealtBatches)
        if shuffle:
            loader.batch_sampler.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
    found = [[batch.tolist() for (batch,) in loader] for loader in loaders]
    assert [len(batches) for batches in found] == [len(loader) for loader in loaders]
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_ranks_get_whole_micro_batches_in_turn(ranks: int) -> None:
    for epoch in (0, 1):
        found = dealt(ranks, shuffle=True, epoch=epoch)
        together = [number for turn in zip(*found, strict=True) for batch in turn for number in batch]
        assert together == GlobalOrder(100, seed=0).ids(epoch, 0, 90).tolist()  # three steps of 30; ten are left over


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_loader_that_does_not_shuffle_loses_and_repeats_nothing(ranks: int) -> None:
    found = dealt(ranks, shuffle=False)
    assert sorted(number for batches in found for batch in batches for number in batch) == list(range(100))


def test_a_dealt_loader_keeps_what_it_was_given() -> None:
    def collate(samples: list[object]) -> int:
        return len(samples)

    loader = deal(DataLoader(DATA, 5, shuffle=True, collate_fn=collate, timeout=0, num_workers=0), 6, 0, 0, 1)
    assert list(loader) == [5] * 18
    assert deal(loader, 6, 0, 0, 1) is loader


def test_a_number_of_ranks_that_does_not_go_is_refused_with_those_that_do() -> None:
    assert [accumulation_steps(12, ranks) for ranks in (1, 2, 3, 4, 6, 12)] == [12, 6, 4, 3, 2, 1]
    with pytest.raises(UserError, match=re.escape("start 1 or 2 or 3 or 6 ranks, or choose a multiple of 4")):
        accumulation_steps(6, 4)
    with refusing():
        accumulation_steps(0, 1)


def test_data_that_cannot_be_dealt_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(100))

    with refusing():
        WholeSteps(Stream(), 10)  # type: ignore[arg-type]
    with refusing():
        WholeSteps(DATA, 101)
    with refusing():
        deal(DataLoader(DATA, 5, sampler=WholeSteps(DATA, 30)), 6, 0, 0, 1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("adapter", "package"), [("lightning",) * 2, ("fabric", "lightning"), ("accelerate",) * 2, ("transformers",) * 2]
)
def test_a_missing_package_is_one_clear_error(adapter: str, package: str) -> None:
    said = ask(import_without, adapter, package)
    line = f"ddp_core.adapters.{adapter} needs {package}: pip install 'samebits[peers]', or {package} alone"
    assert said.splitlines()[0] == line


def import_without(adapter: str, package: str) -> str:
    sys.modules[package] = None  # type: ignore[assignment]
    try:
        importlib.import_module(f"ddp_core.adapters.{adapter}")
    except ModuleNotFoundError as error:
        return str(error)
    return "no error"

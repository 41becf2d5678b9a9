"""What a data set and a collate function draw follows from the micro-batch, on any number of ranks and workers."""

from __future__ import annotations

import gc
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ddp_core.adapters.dealing import WholeSteps, deal, keyed_in_place
from ddp_core.base.errors import UserError
from tests.support.wording import refusing

Batches = dict[tuple[int, ...], Tensor]


class Noise(Dataset[Tensor]):
    """The number of a sample, and what each of the three global generators draws."""

    name = "noise"

    def __len__(self) -> int:
        return 60

    def __getitem__(self, number: int) -> Tensor:
        return torch.tensor([number, random.random(), np.random.rand()], dtype=torch.float64)


class OwnGenerator(Noise):
    def __init__(self) -> None:
        self.generator = random.Random(0)

    def __getitem__(self, number: int) -> Tensor:
        return torch.tensor([number, self.generator.random()])


class Together(Noise):
    def __getitems__(self, numbers: list[int]) -> list[Tensor]:
        assert type(numbers) is list
        return [self[number] for number in numbers]


def masked(samples: list[Tensor]) -> Tensor:
    stacked = torch.stack(samples)
    return torch.cat([stacked, torch.rand(len(samples), 1, dtype=torch.float64)], 1)


def read(ranks: int, workers: int, dataset: Dataset[Tensor], shuffle: bool = True, epochs: int = 2) -> list[Batches]:
    """The micro-batches of each epoch by the numbers of their samples."""
    found: list[Batches] = [{} for _ in range(epochs)]
    for rank in range(ranks):
        loader = deal(DataLoader(dataset, 5, shuffle, num_workers=workers, collate_fn=masked), 6, 0, rank, ranks)
        for epoch in range(epochs):
            loader.batch_sampler.sampler.set_epoch(epoch)  # type: ignore[union-attr]
            found[epoch] |= {tuple(batch[:, 0].int().tolist()): batch for batch in loader}
    return found


def same(one: list[Batches], other: list[Batches]) -> bool:
    return all(
        first.keys() == second.keys() and all(torch.equal(first[ids], second[ids]) for ids in first)
        for first, second in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(("ranks", "workers", "dataset"), [(2, 0, Noise()), (3, 0, Together()), (1, 2, Noise())])
def test_draws_are_the_same_on_any_number_of_ranks_and_workers(ranks: int, workers: int, dataset: Noise) -> None:
    assert same(read(1, 0, Noise()), read(ranks, workers, dataset))


def test_other_epochs_draw_other_numbers() -> None:
    first, second = read(1, 0, Noise(), shuffle=False)
    assert first.keys() == second.keys()
    assert not any(torch.equal(first[ids][:, 1:], second[ids][:, 1:]) for ids in first)
    drawn = torch.cat(list(first.values()))[:, 1:]
    assert len(drawn.unique()) == drawn.numel()


def refusal(workers: int) -> str:
    try:
        read(1, workers, OwnGenerator())
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_is_another_when_it_is_read_again_is_refused(workers: int) -> None:
    said = refusal(workers)
    gc.collect()  # ends the worker
    assert re.search(r"micro-batch 0 of epoch 0 \(samples .*, …\) .*: OwnGenerator or its collate", said)


def test_in_an_evaluation_it_is_a_warning_since_weights_do_not_depend_on_it() -> None:
    trains = False
    loader = deal(DataLoader(OwnGenerator(), 5), 6, 0, 0, 1, lambda: trains)
    with pytest.warns(UserWarning, match="in an evaluation, micro-batch 0 of epoch 0") as warned:
        assert len(list(loader)) == 12
    assert len(warned) == 1
    loader = deal(DataLoader(OwnGenerator(), 5), 6, 0, 0, 1, lambda: trains)
    trains = True  # asked when an iteration begins
    with refusing():
        list(loader)


def test_a_loader_that_shuffles_in_its_own_way_is_keyed_in_place() -> None:
    loader = DataLoader(Noise(), 5, sampler=WholeSteps(Noise(), 30), collate_fn=masked)
    keyed = keyed_in_place(loader, 0)
    assert same([{tuple(batch[:, 0].int().tolist()): batch for batch in keyed}], read(1, 0, Noise(), epochs=1))
    assert (keyed.dataset.name, len(keyed.dataset), len(keyed)) == ("noise", 60, 12)
    assert type(keyed_in_place(DataLoader(Noise(), 5), 0).batch_sampler.sampler) is WholeSteps


@pytest.mark.parametrize(
    "make", [lambda: DataLoader(Noise(), batch_size=None), lambda: DataLoader(Noise(), batch_sampler=[[1, 2], [3]])]
)
def test_a_loader_with_batches_of_another_kind_stays_as_it_is(make: Callable[[], DataLoader[Any]]) -> None:
    loader = make()
    assert keyed_in_place(loader, 0) is loader

"""Reading samples twice: which one differs, and how often it is done."""

from __future__ import annotations

import random

import pytest
import torch
from ddp_core.trainers.read_twice import ReadTwice
from torch import Tensor

from ddp_core.config.cut import BatchCut
from ddp_core.config.experiment import Experiment
from ddp_core.config.layout import Layout
from ddp_core.data.loader import Loader
from ddp_core.data.splits import InMemory
from ddp_core.trainers.batches import Batches

EXPERIMENT = Experiment(name="rows", global_batch_size=8, micro_batch=4, epochs=2)


class Rows:
    """Rows of which some are random; it counts how often each is read."""

    def __init__(self, *random_ones: int) -> None:
        self.random_ones, self.reads = random_ones, [0] * 64

    def __len__(self) -> int:
        return len(self.reads)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.reads[index] += 1
        row = torch.full((3,), float(index))
        if index in self.random_ones:
            row[1] = random.SystemRandom().random()
        return row, torch.tensor(index % 2)


def batches(dataset: Rows | InMemory) -> Batches:
    return Batches(EXPERIMENT, BatchCut.of(EXPERIMENT, Layout()), len(dataset), Loader(dataset), [0])


def watched(dataset: Rows | InMemory, steps: int = 16) -> tuple[ReadTwice, str | None]:
    read = ReadTwice(batches(dataset))
    for batch in batches(dataset).starting_at(0, steps):
        read.before_step(batch)
    return read, read.finding


def test_the_samples_that_differ_are_named() -> None:
    rows = Rows(*range(64))
    first = batches(rows).ids(0, BatchCut.of(EXPERIMENT, Layout()).share(0, 8)[0]).tolist()
    assert watched(rows)[1] == (
        f"samples {', '.join(map(str, first[:3]))} and 1 more are not the same when read again in step 1"
    )
    assert watched(Rows(first[2]))[1] == f"sample {first[2]} is not the same when read again in step 1"
    assert watched(Rows())[1] is None


def test_steps_1_2_4_8_are_looked_at_in_the_first_epoch_alone() -> None:
    rows = Rows()
    read, _ = watched(rows)
    again = sum(rows.reads) - 2 * 64
    assert again >= 4 * 4, "four steps of the first epoch, which has eight"
    assert again % 4 == 0, "whole micro-batches"
    assert read.is_on(0)
    assert not read.is_on(1)


def test_reading_again_takes_the_time_that_the_page_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 0.4 s, and a millisecond for each of the four samples that are read again."""
    rows = Rows()
    rows.reads = [0] * 1600
    all_batches, read = batches(rows), ReadTwice(batches(rows))
    now = 0.0
    monkeypatch.setattr("ddp_core.trainers.read_twice.time.perf_counter", lambda: now + 0.001 * sum(rows.reads))
    for batch in all_batches.starting_at(0, 200):
        # What the loop itself reads takes no time here.
        now += 0.4 - 0.001 * 8
        read.before_step(batch)
    spent = 0.001 * (sum(rows.reads) - 1600)
    powers_of_two = 8 * 4 * 0.001
    assert 0.003 * now - 0.004 <= spent <= 0.003 * now + powers_of_two


def test_a_data_set_that_cannot_be_read_again_is_told() -> None:
    class Once(Rows):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            if self.reads[index]:
                raise KeyError(index)
            return super().__getitem__(index)

    found = watched(Once(), steps=1)[1]
    assert found is not None
    assert "cannot be read again in step 1 (KeyError: " in found


def test_data_of_this_package_are_not_read_again() -> None:
    read, found = watched(InMemory(torch.zeros(64, 3), torch.zeros(64)), steps=8)
    assert (found, read.is_on(0)) == (None, False)

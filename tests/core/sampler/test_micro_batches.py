"""MicroBatches: the same micro-batches on every layout, and a position from which any number of ranks goes on."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from ddp_core.base.seeds import share_of
from ddp_core.sampler import ElasticSampler, GlobalOrder, MicroBatches
from tests.support.wording import refusing

SAMPLES, M, SIZE = 103, 5, 4


class Dealt:
    """A reduction that reduces nothing: one of `world_size` ranks, with contiguous or strided shares."""

    def __init__(self, rank: int, world_size: int, strided: bool, micro_batches: int = M) -> None:
        self.rank, self.world_size, self.strided, self.micro_batches = rank, world_size, strided, micro_batches
        self.begun: list[int] = []

    def share_of(self, micro_batches: int) -> range:
        if self.strided:
            return range(self.rank, micro_batches, self.world_size)
        return share_of(micro_batches, self.rank, self.world_size)

    def begin(self, micro_batches: int) -> None:
        self.begun.append(micro_batches)


def sampler_of(rank: int = 0, world_size: int = 1, **options: Any) -> ElasticSampler:
    return ElasticSampler(range(SAMPLES), world_size, rank, seed=7, **options)


def expected(epoch: int, drop_last: bool = False) -> dict[tuple[int, int], list[int]]:
    """The ids of each micro-batch, by the position of its step's first sample and its index."""
    order = GlobalOrder(SAMPLES, 7).ids(epoch, 0, SAMPLES).tolist()
    found = {}
    for first in range(0, SAMPLES, M * SIZE):
        step = order[first : first + M * SIZE]
        if len(step) == M * SIZE or not drop_last:
            parts = [step[begin : begin + SIZE] for begin in range(0, len(step), SIZE)]
            found |= {(first, index): ids for index, ids in enumerate(parts)}
    return found


def passed(batches: MicroBatches[Any], steps: int | None = None) -> dict[tuple[int, int], list[int]]:
    found = {}
    for step in itertools.islice(batches, steps):
        for index, batch in step:
            assert (step.first, index) not in found
            found[step.first, index] = batch.tolist()
    return found


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_the_ranks_together_run_each_micro_batch_once(world_size: int, strided: bool, drop_last: bool) -> None:
    found: dict[tuple[int, int], list[int]] = {}
    for rank in range(world_size):
        sampler, reduction = sampler_of(rank, world_size, drop_last=drop_last), Dealt(rank, world_size, strided)
        sampler.set_epoch(2)
        batches = MicroBatches(range(SAMPLES), sampler, reduction, SIZE)
        assert len(batches) == 5 + (not drop_last)
        mine = passed(batches)
        assert not found.keys() & mine.keys()
        found |= mine
        assert reduction.begun == [M] * 5 + [1] * (not drop_last)  # 103 = 5 * 20 + 3
        assert sampler.samples_trained == (100 if drop_last else 103)
        assert (len(batches), batches.remaining) == (5 + (not drop_last), 0)
    assert found == expected(2, drop_last)


def test_the_length_is_that_of_the_epoch_wherever_the_sampler_stands() -> None:
    sampler = sampler_of()
    batches = MicroBatches(range(SAMPLES), sampler, Dealt(0, 1, False), SIZE)
    found = []
    for step in batches:
        found.append((len(batches), batches.remaining, step.samples))
        assert len(list(step)) == step.micro_batches
    assert found == [(6, left, 20 if left > 1 else 3) for left in (6, 5, 4, 3, 2, 1)]
    sampler.set_epoch(1)
    sampler.advance(30)  # with another global batch: a step and a half of this one
    assert (len(batches), batches.remaining) == (2 + 4, 4)


@pytest.mark.parametrize("strided", [False, True])
def test_a_pass_goes_on_in_mid_epoch_with_another_number_of_ranks(strided: bool) -> None:
    found: dict[tuple[int, int], list[int]] = {}
    state = sampler_of().state_dict()
    for world_size, steps in ((3, 2), (1, 1), (2, None)):
        samplers = [sampler_of(rank, world_size) for rank in range(world_size)]
        for rank, sampler in enumerate(samplers):
            sampler.load_state_dict(state)
            found |= passed(MicroBatches(range(SAMPLES), sampler, Dealt(rank, world_size, strided), SIZE), steps)
        assert all(sampler.state_dict() == samplers[0].state_dict() for sampler in samplers)
        state = samplers[0].state_dict()
    assert found == expected(0)


def test_worker_processes_change_nothing_and_the_position_does_not_run_ahead() -> None:
    sampler, alone = sampler_of(), Dealt(0, 1, False)
    batches = MicroBatches(range(SAMPLES), sampler, alone, SIZE, num_workers=2, collate_fn=torch.tensor)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert passed(batches) == expected(epoch)
    sampler.set_epoch(2)
    during, after = [], []
    for step in batches:
        during += [sampler.samples_trained - step.first for _ in step]
        after.append(sampler.samples_trained)
    assert set(during) == {0}
    assert after == [20, 40, 60, 80, 100, 103]


def test_each_micro_batch_has_random_numbers_of_its_own_on_every_layout() -> None:
    def numbers(world_size: int, epoch: int = 0, seed: int = 7) -> dict[tuple[int, int], float]:
        found = {}
        for rank in range(world_size):
            sampler = ElasticSampler(range(SAMPLES), 1, 0, seed=seed)
            sampler.set_epoch(epoch)
            for step in MicroBatches(range(SAMPLES), sampler, Dealt(rank, world_size, True), SIZE):
                found |= {(step.first, index): torch.rand(()).item() for index, _ in step}
        return found

    assert numbers(1) == numbers(2)
    # Another number here would end every training that draws random numbers with other weights.
    assert (numbers(1)[0, 0], numbers(1)[0, 4]) == (0.9397425651550293, 0.10744041204452515)
    everywhere = [*numbers(1).values(), *numbers(1, epoch=1).values(), *numbers(1, seed=8).values()]
    assert len(set(everywhere)) == len(everywhere) == 3 * len(numbers(1))
    before = torch.random.get_rng_state()
    for step in MicroBatches(range(SAMPLES), sampler_of(), Dealt(0, 1, True), SIZE, keyed_random=False):
        assert [index for index, _ in step] == list(range(step.micro_batches))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_another_pass_over_a_step_begins_it_anew_with_other_random_numbers_on_every_layout() -> None:
    def numbers(world_size: int) -> dict[tuple[int, int, int], float]:
        found = {}
        for rank in range(world_size):
            sampler, dealt = sampler_of(), Dealt(rank, world_size, False)
            for step in MicroBatches(range(SAMPLES), sampler, dealt, SIZE):
                kept = list(step)
                for again in (1, 2):
                    parts = step.again(kept)
                    found |= {(step.first, again, index): torch.rand(()).item() for index, _ in parts}
                assert dealt.begun[-3:] == [step.micro_batches] * 3
            assert sampler.samples_trained == SAMPLES
        return found

    assert numbers(1) == numbers(3)
    assert len(set(numbers(1).values())) == len(numbers(1)) == 2 * 26


def test_a_step_that_is_skipped_left_early_or_run_twice_is_named() -> None:
    batches = MicroBatches(range(SAMPLES), sampler_of(), Dealt(0, 1, False), SIZE)
    first, second = itertools.islice(batches, 2)
    with refusing(RuntimeError):
        next(iter(second))
    assert len(list(first)) == M
    next(iter(second))
    assert batches.sampler.samples_trained == 20
    with refusing(RuntimeError):
        next(iter(first))


def test_an_epoch_that_was_trained_is_not_passed_over_in_silence() -> None:
    sampler = sampler_of()
    batches = MicroBatches(range(SAMPLES), sampler, Dealt(0, 1, False), SIZE)
    passed(batches)
    with pytest.raises(RuntimeError, match=r"call sampler.set_epoch\(1\)"):
        iter(batches)
    sampler.set_epoch(1)
    assert passed(batches) == expected(1)
    resumed = sampler_of()  # from a state that was saved after the last step of an epoch
    resumed.load_state_dict(sampler.state_dict())
    assert passed(MicroBatches(range(SAMPLES), resumed, Dealt(0, 1, False), SIZE)) == {}


def test_what_does_not_fit_is_refused() -> None:
    with refusing(ValueError):
        MicroBatches(range(100), sampler_of(), Dealt(0, 1, False), SIZE)
    with refusing(ValueError):
        MicroBatches(range(SAMPLES), sampler_of(), Dealt(0, 1, False), 0)
    assert len(MicroBatches(range(SAMPLES), sampler_of(), Dealt(0, 1, False), 1)) == 21
    with refusing(ValueError):
        MicroBatches(range(SAMPLES), sampler_of(), Dealt(0, 1, False), SIZE, shuffle=True)
    by_epoch = type("ByEpoch", (list,), {"set_epoch": None})(range(SAMPLES))
    workers = {"num_workers": 1, "persistent_workers": True}
    with refusing(ValueError):
        MicroBatches(by_epoch, sampler_of(), Dealt(0, 1, False), SIZE, **workers)

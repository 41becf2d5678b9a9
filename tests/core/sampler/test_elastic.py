"""Ranks share an order without overlap, also after a resume on another number of them."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterable
from itertools import chain, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from ddp_core.sampler import BLOCK, ElasticSampler, GlobalOrder, Permutation
from tests.support.wording import refusing


def ranks_of(length: int, world_size: int, **options) -> list[list[int]]:
    return [list(ElasticSampler(range(length), world_size, rank, **options)) for rank in range(world_size)]


def joined(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("world_size", range(1, 9))
@pytest.mark.parametrize("length", [0, 1, 7, 840, 1437, 20_011])
def test_ranks_never_overlap_and_cover_everything(length: int, world_size: int, shuffle: bool) -> None:
    ranks = ranks_of(length, world_size, shuffle=shuffle)
    assert sorted(joined(ranks)) == list(range(length))
    assert max(map(len, ranks)) - min(map(len, ranks)) <= 1

    equal = ranks_of(length, world_size, shuffle=shuffle, drop_last=True)
    assert {len(ids) for ids in equal} == {length // world_size}
    assert len(set(joined(equal))) == length // world_size * world_size


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20_000), st.lists(st.tuples(st.integers(1, 8), st.integers(0, 3000)), min_size=1, max_size=5))
def test_resuming_on_another_world_size_trains_each_remaining_sample_once(
    length: int, stays: list[tuple[int, int]]
) -> None:
    seen: list[int] = []
    state = ElasticSampler(range(length), 1, 0, seed=2).state_dict()
    state["epoch"] = 3
    for number, (world_size, steps) in enumerate(stays):
        samplers = [ElasticSampler(range(length), world_size, rank, seed=2) for rank in range(world_size)]
        for sampler in samplers:
            sampler.load_state_dict(json.loads(json.dumps(state)))
            sampler.set_epoch(3)
        ranks = [list(sampler) for sampler in samplers]
        assert [len(sampler) for sampler in samplers] == [len(ids) for ids in ranks]
        last = number == len(stays) - 1
        trained = [ids if last else ids[:steps] for ids in ranks]
        seen += joined(trained)
        for sampler in samplers:
            sampler.advance(sum(map(len, trained)))
        states = [sampler.state_dict() for sampler in samplers]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert sorted(seen) == list(range(length))
    assert state["samples_trained"] == length


@pytest.mark.parametrize("workers", [0, 2])
def test_the_cursor_counts_trained_samples_not_prefetched_ones(workers: int) -> None:
    length, world_size, local, steps = 600, 2, 8, 5
    # Each of two workers fetches four batches ahead: 64 ids more than have been trained.
    options = {"num_workers": workers, "multiprocessing_context": "fork", "prefetch_factor": 4} if workers else {}
    sampler = ElasticSampler(range(length), world_size, rank=1, seed=5)
    loader = DataLoader(range(length), batch_size=local, sampler=sampler, **options)
    trained: list[int] = []
    for step, batch in enumerate(loader):
        trained += batch.tolist()
        sampler.advance(local * world_size)
        assert len(loader) == -(-length // world_size // local)
        if step + 1 == steps:
            break
    state = sampler.state_dict()
    assert state["samples_trained"] == steps * local * world_size
    whole = list(ElasticSampler(range(length), world_size, rank=1, seed=5))
    assert trained == whole[: steps * local]

    resumed = ElasticSampler(range(length), world_size, rank=1, seed=5)
    resumed.load_state_dict(state)
    rest = [
        number for batch in DataLoader(range(length), local, sampler=resumed, **options) for number in batch.tolist()
    ]
    assert rest == whole[steps * local :]
    assert list(sampler) == rest


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 40_000), st.booleans(), st.booleans(), st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6000)))
)
def test_an_iterator_continues_where_any_other_stopped(
    length: int, shuffle: bool, drop_last: bool, stays: list[tuple[int, int]]
) -> None:
    """What torchdata's StatefulDataLoader does with it: the iterator's state counts what was handed out."""
    options = {"shuffle": shuffle, "drop_last": drop_last, "seed": 2}
    seen: list[int] = []
    state = iter(ElasticSampler(range(length), 1, 0, **options)).state_dict() | {"epoch": 3}
    for world_size, taken in stays:
        states = []
        samplers = [ElasticSampler(range(length), world_size, rank, **options) for rank in range(world_size)]
        taken = min(taken, (length - state["samples_trained"]) // world_size)
        for sampler in samplers:
            ids = iter(sampler)
            ids.load_state_dict(json.loads(json.dumps(state)))
            assert ids.state_dict() == state
            seen += islice(ids, taken)
            states.append(ids.state_dict())
        assert all(other == states[0] for other in states)
        state = states[0]
    sampler = ElasticSampler(range(length), 1, 0, **options)
    (ids := iter(sampler)).load_state_dict(state)
    seen += ids
    assert sorted(seen) == list(range(length))
    assert ids.state_dict()["samples_trained"] == length
    assert len(list(sampler)) == length  # the next iteration is whole


def test_without_advance_it_repeats_as_distributed_sampler_does() -> None:
    ours = ElasticSampler(range(100), 4, 1)
    theirs: DistributedSampler[int] = DistributedSampler(range(100), 4, 1)
    assert len(ours) == len(theirs) == 25
    assert list(ours) == list(ours)
    first = list(ours)
    ours.set_epoch(1)
    theirs.set_epoch(1)
    assert list(ours) != first
    ours.set_epoch(0)
    assert list(ours) == first
    unshuffled = ElasticSampler(range(100), 4, 1, shuffle=False)
    assert list(unshuffled) == list(DistributedSampler(range(100), 4, 1, shuffle=False))
    assert all(type(number) is int for number in first)


def test_an_epoch_ends_at_its_length_also_where_the_last_step_has_fewer_samples() -> None:
    sampler = ElasticSampler(range(10), 2, 0)
    for _ in range(3):
        sampler.advance(4)
    assert (sampler.samples_trained, list(sampler), len(sampler)) == (10, [], 0)
    for rank, expected in enumerate(([0, 2, 4], [1, 3])):
        ids = iter(ElasticSampler(range(5), 2, rank, shuffle=False))
        assert list(islice(ids, 3)) == expected
        assert ids.state_dict()["samples_trained"] == 5


@pytest.mark.parametrize(("length", "options"), [(11, {}), (10, {"seed": 1}), (10, {"shuffle": False})])
def test_a_position_in_another_order_or_format_is_refused(length: int, options: dict[str, int]) -> None:
    state = ElasticSampler(range(10), 2, 0).state_dict()
    sampler = ElasticSampler(range(length), 2, 0, **options)
    for other in (state, sampler.state_dict() | {"format": 0}):
        with refusing(ValueError):
            sampler.load_state_dict(other)


def test_misuse_is_refused() -> None:
    for rank in (-1, 2):
        with refusing(ValueError):
            ElasticSampler(range(10), 2, rank)
    with refusing(ValueError):
        ElasticSampler(range(10), 2, 0).advance(-1)
    with pytest.raises(ValueError, match="process group"):  # torch's words
        ElasticSampler(range(10))
    for length in (-1, 2**63):
        with refusing(ValueError):
            Permutation(length, (0,))


def test_an_iterator_takes_an_epoch_that_was_chosen_before_its_state_came() -> None:
    def standing(chosen: int | None, epoch: int, trained: int = 6) -> tuple[ElasticSampler, list[int]]:
        """As StatefulDataLoader does, which loads its state when it is iterated: after set_epoch, and after advance."""
        sampler = ElasticSampler(range(10), 1, 0, shuffle=False)
        list(sampler)
        if chosen is not None:
            sampler.set_epoch(chosen)
            sampler.advance(2)
            sampler.set_epoch(chosen)
            assert sampler.samples_trained == 2
        ids = iter(sampler)
        ids.load_state_dict(sampler.state_dict() | {"epoch": epoch, "samples_trained": trained})
        found = list(ids)
        assert ids.state_dict() == sampler.state_dict() | {"samples_trained": 10}
        return sampler, found

    for sampler, ids in (standing(1, 1), standing(0, 0), standing(None, 1), standing(None, 0)):
        assert ids == [6, 7, 8, 9]
        assert (sampler.samples_trained, len(sampler)) == (6, 4)
    sampler, ids = standing(2, 1)
    assert (sampler.epoch, sampler.samples_trained, ids) == (2, 0, list(range(10)))
    with pytest.raises(ValueError, match=r"in epoch 2, but set_epoch\(1\) was called: call set_epoch\(2\)"):
        standing(1, 2)
    sampler, _ = standing(None, 1)
    sampler.advance(1)
    assert len(list(sampler)) == len(sampler) == 3
    (again := iter(sampler)).load_state_dict(sampler.state_dict() | {"samples_trained": 9})
    assert list(again) == [9]
    sampler.set_epoch(5)
    assert (sampler.samples_trained, len(sampler)) == (0, 10)


@pytest.mark.parametrize("length", [10**9, 10**12])
def test_a_loop_and_an_iterator_hold_less_than_a_megabyte(length: int) -> None:
    tracemalloc.start()
    order, ids = GlobalOrder(length, 0), iter(ElasticSampler(range(length), 4, 1))
    for step in range(2 * BLOCK // 64):
        order.ids(0, step * 64, (step + 1) * 64)
    loop = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    held = tracemalloc.get_traced_memory()[0]
    for _ in range(BLOCK):
        next(ids)
    iterator = tracemalloc.get_traced_memory()[1] - held
    tracemalloc.stop()
    assert loop < 1_000_000
    assert iterator < 1_000_000

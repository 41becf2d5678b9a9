"""Parameters sharded by torch's fully_shard, in real processes: the bits of one process, on every world size."""

from __future__ import annotations

import functools

import pytest

from tests.distributed import fully_sharded_cases as cases
from tests.support.processes import run_processes

WORLD_SIZES = [pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 3, 4, 5, 8)]


@functools.cache
def results(world_size: int) -> list[dict[str, tuple[str, str]]]:
    """The results of all cases on `world_size` ranks; they run once."""
    return run_processes(cases.everything, world_size, names_for(world_size))


def names_for(world_size: int) -> tuple[str, ...]:
    """Of the cases that have a micro-batch for each rank."""
    return tuple(name for name, case in cases.CASES.items() if case.micro_batches >= world_size)


@functools.cache
def references() -> dict[str, tuple[str, str]]:
    """The digests of all cases in one process without a process group."""
    (result,) = run_processes(cases.alone, 1, tuple(cases.CASES))
    return result


@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_trainings_end_with_the_state_of_one_process(world_size: int) -> None:
    for name in names_for(world_size):
        assert results(world_size)[0][name] == references()[name], name


def test_a_training_is_that_of_one_process_and_mixes_with_nothing() -> None:
    run_processes(cases.trains_as_one_process, 2)


@pytest.mark.full
def test_a_torch_before_2_13_ends_with_the_state_of_one_process() -> None:
    names = ("sometimes unused",)
    found = run_processes(cases.everything_before_2_13, 2, names)[0]
    assert [found] == run_processes(cases.alone, 1, names)

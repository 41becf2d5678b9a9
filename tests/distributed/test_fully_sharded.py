"""Parameters sharded by torch's fully_shard, in real processes: the bits of one process, on every world size."""

from __future__ import annotations

import functools

import pytest

from tests.distributed import fully_sharded_cases as cases
from tests.support.processes import run_processes

WORLD_SIZES = [pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 3, 4)]


@functools.cache
def results(world_size: int) -> list[dict[str, str]]:
    """The results of all cases on `world_size` ranks; they run once."""
    return run_processes(cases.everything, world_size, tuple(cases.CASES))


@functools.cache
def references() -> dict[str, str]:
    """The digests of all cases in one process without a process group."""
    (result,) = run_processes(cases.alone, 1, tuple(cases.CASES))
    return result


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", cases.CASES)
def test_a_training_ends_with_the_state_of_one_process(name: str, world_size: int) -> None:
    assert results(world_size)[0][name] == references()[name]


@pytest.mark.full
def test_a_torch_before_2_13_ends_with_the_state_of_one_process() -> None:
    names = ("sometimes unused",)
    found = run_processes(cases.everything_before_2_13, 2, names)[0]
    assert [found] == run_processes(cases.alone, 1, names)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fused", "residual network", "transformer", "partly frozen"])
def test_a_state_goes_from_one_world_size_to_any_other(name: str) -> None:
    (whole,) = run_processes(cases.go_on, 1, name, None, None)
    for before, after in ((3, 2), (1, 4), (2, 1), (3, 3)):
        saved = run_processes(cases.go_on, before, name, None, 2)[0]["state"]
        ends = run_processes(cases.go_on, after, name, saved, None)
        assert ends[0]["digest"] == whole["digest"], (before, after)
        assert all(end["outputs"] == whole["outputs"] for end in ends), "an evaluation on every rank"

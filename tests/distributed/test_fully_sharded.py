"""Parameters sharded by torch's fully_shard, in real processes: the bits of one process, on every world size."""

from __future__ import annotations

import functools

import pytest

from tests.distributed import fully_sharded_cases as cases
from tests.support.processes import run_processes

WORLD_SIZES = [pytest.param(size, marks=pytest.mark.slow) for size in (1, 2, 3, 4)]


@functools.cache
def results(world_size: int) -> list[dict]:
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
    assert results(world_size)[0]["digests"][name] == references()[name]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_no_communication_thread_is_left(world_size: int) -> None:
    assert [result["threads"] for result in results(world_size)] == [[]] * world_size


def test_three_ranks_end_with_the_state_of_one_process() -> None:
    found = run_processes(cases.glance, 3)[0]
    assert found.digests[0] == found.digests[1]
    assert found.whole == [1, 1, 1], "no block is whole while another is used"


@pytest.mark.full
def test_a_torch_before_2_13_ends_with_the_state_of_one_process() -> None:
    names = ("sometimes unused",)
    found = run_processes(cases.everything_before_2_13, 2, names)[0]["digests"]
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


@pytest.mark.slow
def test_what_does_not_fit_is_refused_in_a_line() -> None:
    messages = run_processes(cases.refusals, 2)
    expected = [
        "the parameters of this model cannot be sharded: temperature is a single number, which cannot be cut",
        "the parameters of this model cannot be sharded: weight does not lie row by row in memory",
        "the parameters of this model cannot be sharded: FSDP expects uniform original parameter dtype",
        "the parameters of this model cannot be sharded: its forward uses the parameters of a module",
    ]
    for found in messages:
        assert len(found) == len(expected) + 2, found
        for message, part in zip(found, expected, strict=False):
            assert message.startswith(part), message
            assert "\n" not in message
    assert "micro-batch 0 of range(0, 1, 2) has not been run" in messages[0][-2]
    assert "this rank has not run the step's idle pass" in messages[1][-2]
    assert all("backward outside of ExactReduction.micro_batch" in found[-1] for found in messages)


def test_ranks_that_call_unlike_blocks_are_refused_before_they_mix_them_up() -> None:
    for messages in run_processes(cases.left_out, 2):
        assert len(messages) == 2
        assert all("comes to layers.0 and layers.1 in another sequence" in message for message in messages), messages

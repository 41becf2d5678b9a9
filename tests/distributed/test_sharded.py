"""Sharded training in real processes: weights, buffers and optimizer state have the bits of one process."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

from ddp_core.sharding import OwnsPieces
from tests.distributed import sharded_cases as cases
from tests.support.processes import run_processes

QUICK = ["fused adamw, clipped"]
"""The cases that a fast run trains, on two ranks: uneven, tied, frozen and unused parameters, and batch-norm."""
WORLD_SIZES = [1, 2, 3, 4, 5, 8]


@functools.cache
def results(world_size: int, carrier: str = "messages") -> list[dict]:
    """The results of all cases on `world_size` ranks; they run once."""
    return run_processes(cases.everything, world_size, carrier, names_for(world_size))


def names_for(world_size: int) -> list[str]:
    """Of the cases that have a micro-batch for each rank."""
    return [name for name, case in cases.TRAININGS.items() if case.micro_batches >= world_size]


@functools.cache
def references() -> dict[str, Any]:
    """The results of all cases in one process without shards."""
    (result,) = run_processes(cases.alone, 1, list(cases.TRAININGS))
    return result


def check(found: list[dict], name: str, way: str, reference: dict[str, Any]) -> None:
    weights, state = reference["digests"][name]
    assert {result["digests"][name, way][0] for result in found} == {weights}
    assert [result["digests"][name, way][1] for result in found] == [state] + ["None"] * (len(found) - 1)


def test_two_ranks_end_with_the_bits_of_one_process() -> None:
    answers = run_processes(cases.both, 2, QUICK)
    found, reference = [result for result, _ in answers], answers[0][1]
    for way in cases.WAYS:
        check(found, QUICK[0], way, reference)
    assert max(result["bytes"][QUICK[0]] for result in found) <= (1 / 2 + 0.02) * reference["bytes"][QUICK[0]]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("world_size", "carrier"),
    [*((size, "messages") for size in WORLD_SIZES), (3, "collectives"), (3, "through host memory")],
)
def test_sharded_trainings_end_with_the_bits_of_one_process(world_size: int, carrier: str) -> None:
    for name, way in itertools.product(names_for(world_size), cases.WAYS):
        check(results(world_size, carrier), name, way, references())


@pytest.mark.slow
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_each_rank_keeps_its_part_of_the_optimizers_state(world_size: int) -> None:
    for name in ("momentum", "fused adamw, clipped", "several groups"):
        whole = references()["bytes"][name]
        kept = [result["bytes"][name] for result in results(world_size)]
        assert sum(kept) == whole
        assert max(kept) <= (1 / world_size + 0.02) * whole


@pytest.mark.slow
@pytest.mark.parametrize("way", cases.WAYS)
@pytest.mark.parametrize("where", ["forward", "hook", "exchange", "update", "gather"])
def test_an_error_on_one_rank_ends_every_rank(where: str, way: str) -> None:
    messages = run_processes(cases.fail_on_one_rank, 3, where, way)
    assert all(messages), messages
    assert "on purpose" in messages[1]


@pytest.mark.slow
@pytest.mark.parametrize("way", cases.WAYS)
def test_strided_shares_let_no_gradient_outlive_its_backward(way: str) -> None:
    for whole, most in run_processes(cases.gradients_alive, 2, way):
        # Strided: four of twelve flat tensors may be on their way, and one more has just arrived.
        assert most <= whole * 5 / 12 if way == "strided" else most >= whole


def test_a_gradient_that_comes_after_its_group_is_sent_is_refused() -> None:
    net = cases.CheckpointedTwice()
    with OwnsPieces(net, torch.optim.SGD(net.parameters()), 1).reduction as exact:
        exact.begin()
        with pytest.raises(RuntimeError, match="use_reentrant=False"), exact.micro_batch(0):
            net(torch.ones(1, 4)).sum().backward()

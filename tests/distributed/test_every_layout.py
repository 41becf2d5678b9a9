"""Each shard mode on each number of ranks, up to one rank for each micro-batch: the bits are those of one process."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest

from ddp_core.config.layout import SHARD_MODES, ShardMode
from tests.distributed import fully_sharded_cases, sharded_cases
from tests.distributed.test_layouts import train_on_two_nodes
from tests.support.commands import trained
from tests.support.layout_cases import EVERY_KIND, digests
from tests.support.processes import run_processes

pytestmark = pytest.mark.slow
MODES: tuple[ShardMode, ...] = ("none", *SHARD_MODES)
BF16 = ("--set", "precision=bf16")
# Gradients are clipped in char_transformer. Eight micro-batches each, so that most ranks accumulate several.
CHARACTERS = ["char_transformer", "--set", "max_steps=2", "--set", "data.stride=512"]
CASES = {
    "digits": ["digits", "--set", "max_steps=3"],
    "digits, clipped, bf16": ["digits", "--set", "max_steps=2", "--set", "clip_norm=0.1", *BF16],
    "char_transformer": CHARACTERS,
    "char_transformer, bf16": [*CHARACTERS, *BF16],
    "frozen, tied and unused": [EVERY_KIND],
    "frozen, tied and unused, bf16": [EVERY_KIND, *BF16],
}


@functools.cache
def alone() -> dict[str, tuple[str, str]]:
    """The digests of every case in one process."""
    with tempfile.TemporaryDirectory() as output:
        return digests(CASES, Path(output), "single", 1)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("shard", MODES)
def test_a_shipped_experiment_ends_with_the_bits_of_one_process(tmp_path: Path, shard: ShardMode, count: int) -> None:
    assert digests(CASES, tmp_path, "ddp", count, shard=shard) == alone()


@pytest.mark.parametrize("name", ["digits", "char_transformer, bf16", "frozen, tied and unused"])
@pytest.mark.parametrize("shard", MODES)
def test_two_nodes_of_two_ranks_end_with_the_bits_of_one_process(tmp_path: Path, shard: ShardMode, name: str) -> None:
    train_on_two_nodes(tmp_path, *CASES[name], "--shard", shard)
    record = trained(tmp_path)[1]
    assert record["layout"]["label"] == "ddp-2x2-cpu" + f"-shard-{shard}" * (shard != "none")
    assert (record["weights_sha256"], record["optimizer_sha256"]) == alone()[name]


@pytest.mark.timeout(900)
def test_every_kind_of_parameter_ends_with_the_same_bits_on_eight_ranks() -> None:
    names = [name for name, case in sharded_cases.TRAININGS.items() if case.micro_batches >= 8]
    found = run_processes(sharded_cases.everything, 8, "messages", names)
    (expected,) = run_processes(sharded_cases.alone, 1, names)
    for name in names:
        for way in sharded_cases.WAYS:
            weights, state = expected["digests"][name]
            assert {result["digests"][name, way][0] for result in found} == {weights}, (name, way)
            assert found[0]["digests"][name, way][1] == state, (name, way)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [5, 8])
def test_sharded_parameters_of_every_kind_end_with_the_same_bits_on_more_ranks(count: int) -> None:
    names = [name for name, case in fully_sharded_cases.CASES.items() if case.micro_batches >= count]
    found = run_processes(fully_sharded_cases.everything, count, names)[0]
    (expected,) = run_processes(fully_sharded_cases.alone, 1, names)
    assert found == expected
    assert len(expected) == len(names) >= 10

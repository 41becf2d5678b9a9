"""Sharded parameters beside the exact sums: torch's own sums, and evaluations, each forward of which gathers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.test_resume import kill_at
from tests.support.commands import train, trained
from tests.support.layout_cases import ADAMW_MLP, EXACT, LOUD, digests

SGD = ("--set", "optimizer.name=sgd", "--set", "optimizer.lr=0.05")
# A block is gathered by itself from 65,536 elements on.
WIDE = (ADAMW_MLP, "--set", "model.width=1100")
OVERFLOW = (LOUD, *SGD, "--set", "optimizer.lr=0.00001", "--set", "max_steps=12")
PLAIN = ("--reduction", "plain")
CASES = {
    "ten micro-batches, clipped": [*WIDE, *SGD, *PLAIN, "--set", "max_steps=8"],
    # The last step has a single micro-batch.
    "ragged end": [*EXACT["ragged end"], *SGD, *PLAIN],
    "overflow": [*OVERFLOW, *PLAIN],
    # So that plain is what the experiment itself asks for.
    "one micro-batch for each rank": [*WIDE, *SGD, "--set", "max_steps=8", "--set", "micro_batch=null"],
}
# The losses of DistributedDataParallel are weighted by the number of ranks, so other steps overflow there.
WITHOUT_SHARDS = CASES | {"overflow": [*OVERFLOW, "--reduction", "exact"]}


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_torchs_own_sums_end_near_those_without_shards(tmp_path: Path, count: int) -> None:
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    digests(WITHOUT_SHARDS, whole, "ddp", count)
    digests(CASES, sharded, "ddp", count, shard="parameters")
    for number, name in enumerate(CASES):
        (other, expected), (run, record) = (trained(output / str(number)) for output in (whole, sharded))
        assert record["options"]["reduction"] == "plain"
        assert record["result"]["train_loss"] == pytest.approx(expected["result"]["train_loss"], rel=1e-4), name
        weights, others = (load_file(each.path / "model.safetensors") for each in (run, other))
        for key, value in weights.items():
            # Batch-norm statistics are those of rank 0's micro-batches, and other ones than with contiguous shares.
            if key.endswith(("weight", "bias")) or name.startswith("one micro-batch"):
                assert torch.allclose(value.float(), others[key].float(), rtol=1e-4, atol=1e-6), (name, key)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_plain_run_goes_on_with_sharded_parameters_and_without(tmp_path: Path) -> None:
    words = [*CASES["ten micro-batches, clipped"], "--checkpoint-every", "2"]
    expected = train(tmp_path / "undisturbed", *words)["result"]["train_loss"]
    output = tmp_path / "killed"
    kill_at(output, 3, *words, "--shard", "parameters", ranks=3)
    kill_at(output, 5, *words, ranks=2)
    record = train(output, *words, "--resume", "auto", "--shard", "parameters", ranks=2)
    assert record["result"]["train_loss"] == pytest.approx(expected, rel=1e-4)
    assert [attempt["layout"]["shard"] for attempt in record["attempts"]] == ["parameters", "none", "parameters"]


@pytest.mark.slow
def test_an_evaluation_gives_the_same_figures_whichever_ranks_have_batches(tmp_path: Path) -> None:
    short = [*WIDE, "--set", "max_steps=3", "--set"]
    # Three ranks have two of four batches, one or none.
    cases = {
        "four": [*short, "evaluation.samples_per_batch=100"],
        "one": [*short, "evaluation.samples_per_batch=999"],
        "rank 0 has all": [*short, "evaluation.samples_per_batch=100", "--set", "evaluation.where=rank0"],
    }
    digests(cases, tmp_path / "alone", "single", 1)
    digests(cases, tmp_path / "sharded", "ddp", 3, shard="parameters")
    for number, name in enumerate(cases):
        alone, sharded = (trained(tmp_path / each / str(number))[1]["result"] for each in ("alone", "sharded"))
        assert [sharded[key] for key in ("test_loss", "test_accuracy")] == [
            alone[key] for key in ("test_loss", "test_accuracy")
        ], name

"""Evaluations with sharded parameters: each forward of them gathers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import trained
from tests.support.layout_cases import ADAMW_MLP, digests

SGD = ("--set", "optimizer.name=sgd", "--set", "optimizer.lr=0.05")
# A block is gathered by itself from 65,536 elements on.
WIDE = (ADAMW_MLP, "--set", "model.width=1100")


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

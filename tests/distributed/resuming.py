"""Runs that are killed and resumed, and what all of them must end with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddp_core.observe.metrics import read_metrics
from tests.support.commands import ddp, train, trained
from tests.support.layout_cases import ADAMW_MLP

# An epoch has 23 steps, so that the second epoch begins within the run and checkpoints lie inside epochs.
WORDS = (ADAMW_MLP, "--set", "max_steps=26", "--checkpoint-every", "5", "--log-every", "1")
AUTO = ("--resume", "auto")


def digests(record: dict[str, Any]) -> tuple[str, str]:
    return record["weights_sha256"], record["optimizer_sha256"]


def kill_at(output: Path, step: int, *words: str, ranks: int = 0) -> None:
    """Start or resume the run, and have rank 0 killed (SIGKILL) after a step."""
    # Without synchronous saves, the process may or may not die before its last checkpoint is written.
    full = [*words, *AUTO, "--synchronous-save", "--fault", f"kill@{step}"]
    if ranks:
        with pytest.raises(AssertionError, match=r"ranks \[0\] died with \[-9\]"):
            train(output, *full, ranks=ranks)
    else:
        is_first = not any(output.glob("*"))
        ended = ddp("train", *full, "--device", "cpu", "--output", output)
        assert ended.code == -9
        assert ("no run that these settings go on with, so a new one begins" in ended.output) is is_first
    record = trained(output)[1]
    assert record["status"] == "running", "nobody was left to write more"


def check_whole(output: Path, undisturbed: tuple[str, str], record: dict[str, Any]) -> None:
    assert record["status"] == "completed"
    assert digests(record) == undisturbed, "each sample in its step, once"
    directory, _ = trained(output)
    steps = [entry["step"] for entry in read_metrics(directory.metrics, "step")]
    assert steps == sorted(set(steps)), "rolled-back steps are taken back in the metrics"
    assert steps[-1] == 26

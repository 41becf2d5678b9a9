"""Optimizers that keep tensors in lists, dicts or queues: resumed as they were, also where these are cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_core.base.errors import ExitCode
from tests.distributed.resuming import digests
from tests.support.commands import ddp, trained

NESTED = str(Path(__file__).parent / "experiment_files" / "nested_state.py")
DDP = ("--layout", "ddp", "--nproc-per-node", "2")


@pytest.mark.full
@pytest.mark.parametrize(
    "shard", ["gradients", *(pytest.param(m, marks=pytest.mark.slow) for m in ("none", "parameters"))]
)
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path: Path, shard: str) -> None:
    words = ("train", NESTED, "--device", "cpu", "--checkpoint-every", "5", "--output")
    assert ddp(*words, tmp_path / "whole").code == 0
    assert ddp(*words, tmp_path / "cut", "--fault", "kill@6", "--synchronous-save").code != 0
    ended = ddp(*words, tmp_path / "cut", "--resume", "auto", *DDP, "--shard", shard)
    assert ended.code == 0, ended.errors
    (_, cut), (_, whole) = trained(tmp_path / "cut"), trained(tmp_path / "whole")
    assert len(cut["attempts"]) == 2
    assert digests(cut) == digests(whole)


@pytest.mark.parametrize(
    ("kind", "words", "steps"),
    [
        ("object", (), 0),
        pytest.param("object", (*DDP, "--shard", "optimizer"), 0, marks=pytest.mark.full),
        pytest.param("late", (), 3, marks=pytest.mark.full),
    ],
    ids=["single", "cut", "late"],
)
def test_state_that_no_checkpoint_can_hold_is_refused(
    kind: str, words: tuple[str, ...], steps: int, tmp_path: Path
) -> None:
    """After the first update, and where it comes later by the save, which is due at the end."""
    words = (*words, "--log-every", "1", "--device", "cpu", "--output", str(tmp_path))
    ended = ddp("train", NESTED, *words, env={"KIND": kind})
    assert (ended.code, "Traceback" in ended.errors) == (ExitCode.BAD_INPUT, False)
    assert "your optimizer, Nested, keeps a state that no checkpoint can hold: state['state.0.newest']" in ended.errors
    assert trained(tmp_path)[0].metrics.read_text().count('"kind": "step"') == steps

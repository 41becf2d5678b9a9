"""`--fork`: a new run from a checkpoint with other settings; the same bits on every layout, after a kill, in verify."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_core.cli.compare import compare_runs
from ddp_core.record.reading import Run
from tests.distributed.resuming import digests
from tests.support.commands import ddp, train, trained
from tests.support.layout_cases import ADAMW_MLP

# An epoch has 23 steps, so that checkpoints lie inside epochs.
WORDS = (ADAMW_MLP, "--checkpoint-every", "5", "--set", "max_steps=12")
CHANGES = ("--set", "optimizer.lr=0.003", "--set", "optimizer.weight_decay=0.2", "--set", "clip_norm=0.5")
DDP = ("--layout", "ddp", "--nproc-per-node", "2")


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run with checkpoints of the steps 10 and 12."""
    output = tmp_path_factory.mktemp("parent")
    train(output, *WORDS)
    return trained(output)[0].path


@pytest.fixture(scope="module")
def child(parent: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, str]]:
    """The directory of a fork at step 10, and the digests of what it ended with."""
    output = tmp_path_factory.mktemp("child")
    record = train(output, *WORDS, "--fork", str(parent), "--at", "10", *CHANGES)
    return trained(output)[0].path, digests(record)


def refused(output: Path, *words: str, code: int = 2) -> str:
    ended = ddp("train", *WORDS, *words, "--device", "cpu", "--output", output)
    assert (ended.code, "Traceback" in ended.errors) == (code, False), ended.errors
    return ended.errors


@pytest.mark.full
def test_the_record_names_the_parent(parent: Path, child: tuple[Path, tuple[str, str]]) -> None:
    run = Run(child[0])
    fork = run.record["forked_from"]
    assert (fork["run"], fork["step"], fork["hyperparameters"]) == (str(parent), 10, ["weight_decay"])
    assert run.figures["steps"] == 12
    assert digests(run.record) != digests(Run(parent).record)
    said = (child[0] / "log.txt").read_text()
    assert f"fork of {parent} at step 10: " in said
    assert "optimizer.lr 0.01 there, 0.003 here" in said
    assert "resumed at step 10" in said


@pytest.mark.full
def test_a_killed_fork_is_continued_on_another_layout(
    parent: Path, child: tuple[Path, tuple[str, str]], tmp_path: Path
) -> None:
    words = ("--fork", str(parent), "--at", "10", *CHANGES, "--resume", "auto")
    assert ddp("train", *WORDS, *words, "--fault", "kill@11", "--device", "cpu", "--output", tmp_path).code == -9
    assert digests(train(tmp_path, *WORDS, *words, ranks=2)) == child[1]
    assert len(trained(tmp_path)[1]["attempts"]) == 2


@pytest.mark.slow
def test_verify_follows_the_line_of_parents(child: tuple[Path, tuple[str, str]], tmp_path: Path) -> None:
    changes = [*CHANGES, "--set", "clip_norm=0.1", "--set", "max_steps=14"]
    record = train(tmp_path, *WORDS, *changes, "--fork", str(child[0]))
    assert record["forked_from"]["step"] == 12
    found = ddp("verify", trained(tmp_path)[0].path, *DDP, module="tests.support.quick")
    assert found.code == 0, found.output + found.errors
    assert found.output.count("training ") == 3
    assert found.output.splitlines()[-1] == "identical"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--set", "seed=4"), "which samples come when"),
        pytest.param(("--set", "ema_decay=0.9"), "hold no averaged weights", marks=pytest.mark.slow),
        pytest.param(("--at", "12"), "set more epochs or max_steps", marks=pytest.mark.slow),
        pytest.param(("--init-from", "x.pt"), "give one of them", marks=pytest.mark.slow),
    ],
)
def test_what_a_fork_cannot_be_is_refused(parent: Path, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    assert said in refused(tmp_path, "--fork", str(parent), *words)
    assert not any(tmp_path.iterdir())


def test_a_resume_with_other_settings_names_the_fork(parent: Path, tmp_path: Path) -> None:
    said = refused(tmp_path, "--resume", str(parent), *CHANGES, code=3)
    assert f"--fork {parent} " in said
    assert "--fork" not in refused(tmp_path, "--resume", str(parent), "--set", "seed=4", code=3)


@pytest.mark.slow
def test_a_fork_is_not_compared_with_what_was_trained_from_the_start(
    child: tuple[Path, tuple[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, *WORDS, *CHANGES)
    assert compare_runs([child[0], trained(tmp_path)[0].path]) == 0
    assert "2 different ones, of other parents" in capsys.readouterr().out

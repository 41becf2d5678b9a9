"""`ddp rehearse`: which layouts it tries, what it finds, and when it says that a long run may be submitted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddp_core.cli.layouts import _layouts
from ddp_core.cli.prepare import load_with_settings
from ddp_core.config.layout import SHARD_MODES, Layout
from ddp_core.run.rehearsal import fitting
from tests.core.cli.asking import said
from tests.support.commands import ddp

FILE = '''"""Is it found before a long run?"""

import torch

from ddp_core import Experiment, InMemory, Optimizer, Splits


def data():
    inputs, targets = torch.ones(64, 4), torch.zeros(64, dtype=torch.int64)
    return Splits(InMemory(inputs, targets), InMemory(inputs[:8], targets[:8] + {label}))


def model(width: int = 4):
    return torch.nn.Linear(4, 2)


experiment = Experiment(
    name="mine", optimizer=Optimizer(lr=0.01), global_batch_size=8, micro_batch=8, epochs=1000
)
'''
LOSES = Path(__file__).parents[1] / "run" / "experiment_files" / "loses.py"


def written(folder: Path, label: int = 0) -> Path:
    (folder / "mine.py").write_text(FILE.format(label=label))
    return folder / "mine.py"


def rehearsed(file: Path | str, *words: object, code: int = 0) -> list[str]:
    """The lines that a rehearsal prints, which ends with this code."""
    ended = ddp("rehearse", file, "--device", "cpu", *words, timeout=800)
    assert ended.code == code, ended.output + ended.errors
    return ended.output.splitlines()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["toy_mpl"], 2),
        (["toy_mlp", "--set", "global_batch_size=64"], 2),
        (["toy_mlp", "--stop-signal", "USR9"], 2),
        (["toy_mlp", "--profile", "soon"], 2),
        (["toy_mlp", "--shard", "optimizer"], 2),
        (["toy_mlp", "--layout", "ddp", "--shard", "optimizer", "--reduction", "plain"], 2),
        (["fashion_mnist", "--data-dir", "no-data"], 2),
        (["toy_mlp", "--output", "FILE"], 4),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_what_would_fail_fails_with_the_words_of_the_run_and_leaves_nothing(
    tmp_path: Path, words: list[str], code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("FILE").touch()
    alone = said(capsys, "rehearse", *words, "--device", "cpu", code=code)
    assert list(tmp_path.rglob("*")) == [tmp_path / "FILE"]
    assert said(capsys, "train", *words, "--device", "cpu", code=code) == alone


def tried(lines: list[str]) -> dict[str, list[str]]:
    """The cells of the table's rows by the layout that was tried."""
    rows = [re.split(r"\s{2,}", line) for line in lines]
    return {row[0]: row[1:] for row in rows if len(row) == 4 and row[0]}


def test_a_run_that_works_may_be_submitted(tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    lines = rehearsed(written(tmp_path), "--output", outputs)
    assert [(layout, cells[0]) for layout, cells in tried(lines).items()] == [("single-cpu", "done")]
    assert lines[-1] == "ready: 1 of 1 done, the same bits; the long run may be submitted"
    assert not outputs.exists()


def test_what_only_an_evaluation_meets_is_found(tmp_path: Path) -> None:
    lines = rehearsed(written(tmp_path, label=7), code=2)
    assert tried(lines)["single-cpu"][:2] == ["failed (2)", "-"]
    assert lines[-1].startswith("NOT ready: single-cpu: the miniature on one process ended with 2: ")


@pytest.mark.full
def test_what_a_resume_would_lose_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOSES", "attribute")
    lines = rehearsed(LOSES, code=1)
    last = lines[-1]
    assert last.startswith("NOT ready: single-cpu: one process, killed and resumed, has other weights")
    assert "Without the kill and the resume all steps are the same" in last


def test_each_layout_that_fits_is_tried_and_the_asked_one_first() -> None:
    def titles(own: Layout, *settings: str) -> list[str]:
        return [layout.label for layout in _layouts(load_with_settings("digits", settings).experiment, own)]

    two = ["dp-2-cpu", "ddp-1x2-cpu", *(f"ddp-1x2-cpu-shard-{mode}" for mode in SHARD_MODES)]
    assert titles(Layout()) == ["single-cpu", *two]
    assert titles(Layout(kind="dp", nproc_per_node=2)) == ["dp-2-cpu", "single-cpu", *two[1:]]
    assert titles(Layout(), "global_batch_size=16", "micro_batch=16") == ["single-cpu"]
    digits = load_with_settings("digits", ()).experiment
    nodes = fitting(digits, Layout(kind="ddp", nnodes=4, nproc_per_node=2))
    assert nodes == Layout(kind="ddp", nproc_per_node=4)

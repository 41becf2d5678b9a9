"""What the README says of GPUs comes from the committed records, not from memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import ARTICLE
from benchmarks.gpu_lines import NAME, append
from benchmarks.gpu_runs import BEGIN, END, PAGE, between_marks, what_ran
from tests.gpu.test_page import SMALL, lines
from tests.support.commands import ROOT, command

ON = {"device": "NVIDIA H100", "devices": 2, "multiprocessors": 132, "driver": "580.1", "torch": "2.13.0+cu130"}
HEAD = {"commit": "0123456789abcdef", "dirty": True, "on": ON, "stand_in": False}
TESTS = {"a": "passed", "b": "passed", "c": "failed", "d": "skipped"}
SWITCHES = {"tf32": {"conv": "tf32", "matmul": "none"}}
WAYS = {"single": "11", "ddp x 2": "11", "dp x 1": "22"}


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A folder with records, and with lines of an older commit and of a stand-in that must not count."""

    def line(**fields: Any) -> dict[str, Any]:
        return {"date": "2026-12-01T10:00:00Z", "part": "", "outcome": "done"} | fields

    file = tmp_path / NAME
    append(file, HEAD | {"commit": "older"}, line(item="tests/gpu/x.py::old", outcome="failed", date="2026-11-01"))
    for way, digest in WAYS.items():
        fields = {"group": "exact fp32", "way": way, "digest": digest}
        append(file, HEAD, line(item=f"exact fp32: {way}", **fields))
    for name, outcome in TESTS.items():
        said = ["needs 2 CUDA device(s), torch finds 1"] if outcome == "skipped" else ["E assert 1 == 2"]
        append(file, HEAD, line(item=f"tests/gpu/x.py::{name}", outcome=outcome, said=said))
    speeds = (ARTICLE, 100.0), ("plain bf16, any kernel", 500.0), ("exact bf16, graph", 300.0)
    for case, speed in (*speeds, ("exact bf16, graph", 200.0), ("exact bf16, graph", 250.0)):
        append(file, HEAD, line(item=f"images/s: {case}", case=case, images_per_second=speed, switches=SWITCHES))
    append(file, HEAD, line(item="collection", tests=9))
    append(file, HEAD, line(item="images/s: cut", outcome="cut off"))
    append(file, HEAD | {"stand_in": True}, line(item="tests/gpu/x.py::c", outcome="passed", date="2027-01-01"))
    return tmp_path


def test_readme_says_what_the_records_say() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    for line in what_ran():
        assert line in readme


@pytest.mark.slow
def test_without_a_gpu_every_test_is_skipped_aloud_and_nothing_is_recorded(tmp_path: Path) -> None:
    record = tmp_path / "lines.jsonl"
    ended = command(
        *("-m", "pytest", "-m", "gpu or gpu2", "-p", "no:cacheprovider", "tests/gpu"),
        program=(),
        env={"CUDA_VISIBLE_DEVICES": "", "DDP_GPU_LINES": str(record)},
    )
    assert ended.code == 0, ended.output + ended.errors
    assert "needs 1 CUDA device(s), torch finds 0" in ended.output
    assert " passed" not in ended.output
    assert not record.exists()


def test_records_in_words(tmp_path: Path, recorded: Path) -> None:
    assert what_ran(tmp_path / "nothing") == [
        "`make gpu-check` has not run on a GPU yet.",
        "`make test-gpu` has not run on a GPU yet.",
        "`make gpu-check` has timed nothing on a GPU yet.",
    ]
    ran = "ran on 2 x NVIDIA H100, torch 2.13.0+cu130, 2026-12-01"
    assert what_ran(recorded) == [
        f"`make gpu-check` {ran}, commit 0123456789ab, with changes: "
        "1 of 2 exact trainings in 1 settings have the digest of one process.",
        f"`make test-gpu` {ran}, commit 0123456789ab, with changes: "
        "2 passed, 1 failed, 1 skipped (needs 2 CUDA device(s), torch finds 1), of 9 tests.",
        f"`make gpu-check` {ran}, commit 0123456789ab, with changes: median of 3 rounds, "
        "times as long as plain with any kernel in the same precision and layout: exact bf16 2.00 (graph).",
    ]


def test_the_page_is_of_the_committed_records() -> None:
    assert f"{BEGIN}\n\n{between_marks()}\n{END}" in PAGE.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("words", [words for words in lines() if "--cuda-graph" not in words], ids=" ".join)
def test_the_pages_commands_train_on_a_cpu_too(words: list[str], tmp_path: Path) -> None:
    ended = command(*words, *SMALL, "--device", "cpu", "--output", tmp_path)
    assert ended.code == 0, ended.output + ended.errors

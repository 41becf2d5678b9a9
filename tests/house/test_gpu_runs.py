"""What the README says of GPUs comes from the committed records, not from memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_runs import what_ran
from benchmarks.record import record
from tests.gpu.test_page import SMALL, lines
from tests.support.commands import ROOT, command
from tests.support.standin_cuda import NAME

MACHINE = {"gpus": ["NVIDIA H100", "NVIDIA H100"], "torch": "2.13.0+cu130"}
TESTS: dict[str, Any] = {
    "date": "2026-12-01T10:00:00Z",
    "machine": MACHINE,
    "results": {
        "code": {"commit": "0123456789abcdef", "dirty": True},
        "passed": ["a", "b"],
        "failed": ["c"],
        "skipped": {"needs 2 CUDA device(s), torch finds 1": 3},
    },
}


def test_readme_says_what_the_records_say() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    for line in what_ran():
        assert line in readme


@pytest.mark.slow
def test_without_a_gpu_every_test_is_skipped_aloud_and_nothing_is_recorded(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    ended = command(
        *("-m", "pytest", "-m", "gpu or gpu2", "-p", "no:cacheprovider", "tests/gpu"),
        program=(),
        env={"CUDA_VISIBLE_DEVICES": "", "DDP_GPU_RECORD": str(record)},
    )
    assert ended.code == 0, ended.output + ended.errors
    assert "needs 1 CUDA device(s), torch finds 0" in ended.output
    assert " passed" not in ended.output
    assert not record.exists()


def test_records_in_words(tmp_path: Path) -> None:
    assert what_ran(tmp_path) == [
        "`make test-gpu` has not run on a GPU yet.",
        "`make bench-gpu` has not run on a GPU yet.",
    ]
    (tmp_path / "gpu_tests.json").write_text(json.dumps(TESTS))
    (tmp_path / "gpu.json").write_text(json.dumps(TESTS | {"results": {"summary": "5.2x the article's loop"}}))
    assert what_ran(tmp_path) == [
        "`make test-gpu` ran on 2 x NVIDIA H100, torch 2.13.0+cu130, 2026-12-01, commit 0123456789ab, with changes: "
        "2 passed, 1 failed, 3 skipped (needs 2 CUDA device(s), torch finds 1).",
        "`make bench-gpu` ran on 2 x NVIDIA H100, torch 2.13.0+cu130, 2026-12-01: 5.2x the article's loop.",
    ]


def test_what_a_stand_in_for_cuda_did_is_no_record_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played = TESTS | {"machine": MACHINE | {"gpus": [NAME]}}
    for name in ("gpu_tests.json", "gpu.json"):
        (tmp_path / name).write_text(json.dumps(played))
    assert all("has not run on a GPU yet" in line for line in what_ran(tmp_path))
    monkeypatch.setattr("benchmarks.record.machine", lambda: played["machine"])
    with pytest.raises(ValueError, match="a stand-in for CUDA"):
        record("gpu_tests", "make test-gpu", {})
    assert json.loads(record("gpu_tests", "", {}, tmp_path / "here.json").read_text())["machine"]["gpus"] == [NAME]


@pytest.mark.slow
@pytest.mark.parametrize("words", [words for words in lines() if "--cuda-graph" not in words], ids=" ".join)
def test_the_pages_commands_train_on_a_cpu_too(words: list[str], tmp_path: Path) -> None:
    ended = command(*words, *SMALL, "--device", "cpu", "--output", tmp_path)
    assert ended.code == 0, ended.output + ended.errors

"""What the README says of GPUs comes from the committed records, not from memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu_runs import BEGIN, END, PAGE, between_marks, what_ran
from tests.support.commands import ROOT, command


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


def test_the_page_is_of_the_committed_records() -> None:
    assert f"{BEGIN}\n\n{between_marks()}\n{END}" in PAGE.read_text()

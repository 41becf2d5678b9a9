"""What is said of GPUs comes from the committed records, not from memory."""

from __future__ import annotations

from benchmarks.gpu_runs import BEGIN, END, PAGE, between_marks


def test_the_page_is_of_the_committed_records() -> None:
    assert f"{BEGIN}\n\n{between_marks()}\n{END}" in PAGE.read_text()

"""What the README says of GPUs comes from the committed records, not from memory."""

from __future__ import annotations

from benchmarks.gpu_runs import BEGIN, END, PAGE, between_marks, what_ran
from tests.support.commands import ROOT


def test_readme_says_what_the_records_say() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    for line in what_ran():
        assert line in readme


def test_the_page_is_of_the_committed_records() -> None:
    assert f"{BEGIN}\n\n{between_marks()}\n{END}" in PAGE.read_text()

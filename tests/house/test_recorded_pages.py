"""Pages say of benchmarks what the recorded results say: figures and rounds, and a row for each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import gpu_runs
from benchmarks.pages import BENCHMARKS, PAGES, made_anew
from benchmarks.record import RESULTS

HOW = "run `python -m benchmarks.pages`, which puts the recorded results into the pages"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_says_what_is_recorded(page: Path) -> None:
    assert page.read_text() == made_anew(page), HOW


def test_every_benchmark_has_a_row() -> None:
    record_something = re.compile(r"\b(?:measure_and_)?record\(\s*[\"'](\w+)[\"']")
    benchmarks = {name for file in RESULTS.parent.glob("*.py") for name in record_something.findall(file.read_text())}
    row = re.compile(
        r"^\| `python -m benchmarks\.(\w+)` \| [^|]+ \| \[\1\.json\]\(results/\1\.json\) \|$", re.MULTILINE
    )
    assert set(row.findall(BENCHMARKS.read_text())) == benchmarks
    assert all((RESULTS / f"{name}.json").exists() for name in benchmarks)


def test_what_is_said_of_gpus_is_of_the_committed_records() -> None:
    assert f"{gpu_runs.BEGIN}\n\n{gpu_runs.between_marks()}\n{gpu_runs.END}" in gpu_runs.PAGE.read_text()

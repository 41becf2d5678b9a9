"""Pages say of benchmarks what the recorded results say: figures and rounds, and a row for each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pages import BENCHMARKS, PAGES, made_anew
from benchmarks.record import RESULTS, recorded
from tests.support.wording import refusing

HOW = "run `python -m benchmarks.pages`, which puts the recorded results into the pages"
IN_ROUNDS = {"seconds", "turns", "rounds", "rounds_ms"}
"""The keys of results below which a list has an entry for each round."""
RECORDED = sorted(re.findall(r"^\| `python -m benchmarks\.(\w+)`", BENCHMARKS.read_text(), re.M))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_says_what_is_recorded(page: Path) -> None:
    assert page.read_text() == made_anew(page), HOW


def test_every_benchmark_has_a_row() -> None:
    record_something = re.compile(r"\brecord\(\s*[\"'](\w+)[\"']")
    benchmarks = {name for file in RESULTS.parent.glob("*.py") for name in record_something.findall(file.read_text())}
    row = re.compile(
        r"^\| `python -m benchmarks\.(\w+)` \| [^|]+ \| \[\1\.json\]\(results/\1\.json\) \|$", re.MULTILINE
    )
    assert set(row.findall(BENCHMARKS.read_text())) == benchmarks
    assert all((RESULTS / f"{name}.json").exists() for name in benchmarks)


def lists_of_rounds(value: Any, inside: bool = False) -> Iterator[int]:
    """The lengths of all lists of results that have an entry for each round."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from lists_of_rounds(part, inside or key in IN_ROUNDS)
    elif isinstance(value, list):
        if inside:
            yield len(value)
        else:
            for part in value:
                yield from lists_of_rounds(part)


@pytest.mark.parametrize("name", RECORDED)
def test_the_recorded_rounds_are_those_of_the_figures(name: str) -> None:
    document = recorded(name)
    assert document is not None
    assert {*lists_of_rounds(document["results"])} <= {document["rounds"]}


def test_a_page_that_has_lost_its_table_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("| a | b |\n|---|---|\n\nIt takes 1.00\ntimes as long.\n")
    monkeypatch.setitem(PAGES, page, {"| a |": lambda: "| a | c |\n|---|---|"})
    assert made_anew(page) == "| a | c |\n|---|---|\n\nIt takes 1.00\ntimes as long.\n"
    page.write_text("nothing\n")
    with refusing(ValueError):
        made_anew(page)

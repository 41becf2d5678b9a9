"""Pages say of benchmarks what the recorded results say: figures and rounds, a row for each benchmark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import last_figures, pages, record
from benchmarks.last_figures import ROUNDS, SAYS
from benchmarks.pages import BENCHMARKS, PAGES, ROW, made_anew
from benchmarks.record import RESULTS, recorded

HOW = "run `python -m benchmarks.pages`, which puts the recorded results into the pages"
IN_ROUNDS = {"seconds", "turns", "rounds", "rounds_ms"}
"""The keys of results below which a list has an entry for each round."""
RECORDED = sorted(name for name in SAYS if (RESULTS / f"{name}.json").exists())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_says_what_is_recorded(page: Path) -> None:
    assert page.read_text() == made_anew(page), HOW


def test_every_benchmark_has_a_row() -> None:
    record_something = re.compile(r"\brecord\(\s*[\"'](\w+)[\"']")
    benchmarks = {name for file in RESULTS.parent.glob("*.py") for name in record_something.findall(file.read_text())}
    assert {row[1] for row in ROW.findall(BENCHMARKS.read_text())} == benchmarks == SAYS.keys()


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


def test_a_row_says_where_rounds_are_fewer_than_the_page_promises(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "medians of five rounds or more, where a row does not say fewer" in " ".join(BENCHMARKS.read_text().split())
    assert ROUNDS == 5
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    results = {"steps": {"ratio": 0.5, "low": 0.4, "high": 0.6}, "own_share": 0.1}
    for rounds, said in ((None, "(rounds not recorded)"), (1, "(one round)"), (4, "(4 rounds)"), (5, "(goal: 0.5 %)")):
        record.record("live_cost", "", results, rounds=rounds)
        assert last_figures.last_figures("live_cost").endswith(said)


def test_what_is_not_recorded_is_not_measured_yet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    assert last_figures.last_figures("live_cost") == record.NOT_YET
    assert "times as long as plain with any kernel in the same precision" in last_figures.last_figures("gpu")
    assert "times the script in bf16" in last_figures.last_figures("gpu_files")
    monkeypatch.setattr(last_figures, "what_was_timed", dict)
    assert "not run on a GPU yet" in last_figures.last_figures("gpu")


def test_a_page_that_has_lost_its_table_or_sentence_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("| a | b |\n|---|---|\n\nIt takes 1.00\ntimes as long.\n")
    contents = pages.Contents({"| a |": lambda: "| a | c |\n|---|---|"}, {r"takes (\S+) times": lambda: "2.00"})
    monkeypatch.setitem(PAGES, page, contents)
    assert made_anew(page) == "| a | c |\n|---|---|\n\nIt takes 2.00\ntimes as long.\n"
    page.write_text("nothing\n")
    with pytest.raises(ValueError, match=r"page\.md: 0 places that look like .*a"):
        made_anew(page)

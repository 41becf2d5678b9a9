"""The records in benchmarks/results/claims: one full run of all claims, under rules that were fixed before it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ddp_lab.claims.framework import statistics, suite
from ddp_lab.claims.framework.document import page
from ddp_lab.claims.framework.provenance import doubt
from ddp_lab.claims.framework.statistics import allowing, holm
from tests.lab.claims.measurements import CLAIMS, PUBLISHED, published

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "evidence" / "claims.md").read_text()


@pytest.mark.parametrize("number", CLAIMS)
def test_the_verdict_follows_from_the_raw_measurements(number: str) -> None:
    content, known = published(number), CLAIMS[number]
    assert content["measurements"] is not None, content["reason"]
    if suite.is_stale(known, content):
        assert f"({suite.RULE_CHANGED})" in PAGE.partition(f"## {number}")[2].partition("\n## ")[0]
        return
    with allowing(content["allowed_p"]):
        again = suite.describe(known.claim, known.judge(content["measurements"]))
    assert_same({name: content[name] for name in again}, again)


def test_what_is_allowed_is_what_holm_allows_for_all_of_them() -> None:
    fresh = [found for number in CLAIMS if not suite.is_stale(CLAIMS[number], found := published(number))]
    p_values = [figure["p"] for content in fresh for figure in content["figures"] if figure["p"] is not None]
    assert {content["allowed_p"] for content in fresh} == {holm(p_values)}


def assert_same(found: Any, expected: Any) -> None:
    """The same tree; numbers up to rounding, because a fit of a curve has other last bits on another CPU."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_same(found[name], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            assert_same(ours, theirs)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-9, nan_ok=True)
    else:
        assert found == expected


@pytest.mark.parametrize("number", CLAIMS)
def test_the_rule_was_there_before_the_measurement(number: str) -> None:
    content, known = published(number), CLAIMS[number]
    assert not doubt(content)
    assert known.file is not None
    files = [str(file.relative_to(ROOT)) for file in (known.file, Path(statistics.__file__))]
    commit = content["environment"]["code"]["commit"]
    words = ["git", "-C", str(ROOT), "log", "-1", "--format=%H %cI", commit, "--", *files]
    if shutil.which("git") is None:
        pytest.skip("needs git")
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    if found.returncode or not found.stdout:
        pytest.skip("needs the history of this repository")
    assert found.stdout.split() == [content["rule_commit"][name] for name in ("commit", "committed_at")]


def test_all_were_measured_in_one_full_run_but_those_whose_rule_is_younger() -> None:
    """So no measurement was chosen among several: a later run of all claims counts for new rules alone."""
    records = [published(number) for number in CLAIMS]
    assert not any(record["environment"]["quick"] for record in records)
    assert all(record["run"]["claims"] == list(CLAIMS) for record in records)
    began = sorted({record["run"]["started_at"] for record in records})
    later = [record for record in records if record["run"]["started_at"] != began[0]]
    assert all(record["history"][-1]["date"] > began[0][:10] for record in later)
    assert len(began) <= 2


def test_the_page_is_made_from_them() -> None:
    assert page(list(CLAIMS.values()), PUBLISHED) == PAGE

"""The raw measurements in docs/reference/claims: one full run of all claims, under rules that were fixed before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddp_lab.claims.framework import suite
from ddp_lab.claims.framework.document import pages

PUBLISHED = Path(__file__).parents[3] / "docs" / "reference"
CLAIMS = {known.claim.id: known for known in suite.known_claims()}


def published(number: str) -> dict[str, Any]:
    content = suite.read(PUBLISHED / "claims" / f"{number}.json")
    assert content is not None, f"{number} is not published: measure all with ddp claims --full, and copy its file"
    return content


@pytest.mark.parametrize("number", CLAIMS)
def test_the_verdict_follows_from_the_raw_measurements(number: str) -> None:
    content, known = published(number), CLAIMS[number]
    assert content["measurements"] is not None, content["reason"]
    again = suite.describe(known.claim, known.judge(content["measurements"]))
    assert_same({name: content[name] for name in again}, again)


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
    content, claim = published(number), CLAIMS[number].claim
    assert content["measured_by_rule"] == claim.digest, "the rule has changed since: measure again"
    assert claim.history[-1].date <= content["measured_at"][:10]


def test_all_were_measured_in_one_full_run() -> None:
    runs = [published(number)["run"] for number in CLAIMS]
    assert all(run == runs[0] for run in runs)
    assert runs[0]["claims"] == list(CLAIMS)
    assert not any(published(number)["environment"]["quick"] for number in CLAIMS)


def test_the_pages_are_made_from_them() -> None:
    made = pages(list(CLAIMS.values()), PUBLISHED)
    assert {name: (PUBLISHED / name).read_text() for name in made} == made
    assert {f"claims/{page.name}" for page in (PUBLISHED / "claims").glob("*.md")} == made.keys() - {"claims.md"}

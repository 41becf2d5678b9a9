"""Figures in the README and the explanations were measured with code close to today's, in enough rounds."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from tests.support.commands import ROOT

MOST_COMMITS, FEWEST_ROUNDS = 300, 5
OF_OTHER_MACHINES = {"numerics", "numerics_amd", "numerics_intel"}
"""Records of kinds of CPU that are not always at hand: their page names the kinds, and the three rounds."""
NAMED = sorted(
    set(re.findall(r"/results/(\w+)\.json", (ROOT / "docs" / "evidence" / "promises-kept.md").read_text()))
    - OF_OTHER_MACHINES
)


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.skipif(
    not (ROOT / ".git").exists() or (ROOT / ".git" / "shallow").exists(),
    reason="the history is not here, or not all of it",
)
@pytest.mark.parametrize("name", NAMED)
def test_a_figure_is_of_enough_rounds_and_of_a_recent_commit(name: str) -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    assert record["rounds"] >= FEWEST_ROUNDS
    assert record["code"]["dirty"] is False
    commit = record["code"]["commit"]
    since = int(git("rev-list", "--count", f"{commit}..HEAD", "--", "ddp_core"))
    assert since < MOST_COMMITS, f"{name}.json: ddp_core has {since} commits more than {commit[:8]}; measure it again"
    assert git("merge-base", commit, "HEAD") == commit, f"{name}.json is of {commit[:8]}, which is not in the history"

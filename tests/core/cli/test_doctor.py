"""`ddp doctor`: what is here, for people and for programs."""

from __future__ import annotations

import json
import re

import pytest

from ddp_core.cli import main
from tests.support.commands import ROOT


def test_what_is_here_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "toy_mlp", "--json"]) == 0
    output, errors = capsys.readouterr()
    found = json.loads(output)
    assert errors == ""
    assert "ddp train digits --device cpu" in found["runs_here"]
    assert found["packages"]["torch"]
    memory = found["memory"]
    assert memory["experiment"] == "toy_mlp"
    assert memory["least"] >= 2 * memory["parts"]["weights"] == 2 * 61 * 4
    assert memory["devices"]["cpu"]["room"] > 0
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    assert {*found, *memory} - set(re.findall(r"`(\w+)`", page)) == set(), "documented"


def test_an_error_leaves_the_output_to_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["doctor", "toy_mpl", "--json"], ["compare", "nowhere", "--json"]):
        assert main(words) == 2
        assert capsys.readouterr().out == ""

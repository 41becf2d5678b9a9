"""The page on stability names the formats, and the versions of Python and torch, that the code has."""

from __future__ import annotations

import re
import tomllib

from ddp_core.base.torch_names import TRIED
from tests.support.commands import ROOT

PAGE = (ROOT / "docs" / "reference" / "stability.md").read_text()
FORMAT = re.compile(r"\bddp-[a-z]+/\d+\b")


def test_the_page_has_every_format() -> None:
    code = [file.read_text() for room in ("ddp_core", "ddp_lab") for file in (ROOT / room).rglob("*.py")]
    named = {found for text in code for found in re.findall(rf'"({FORMAT.pattern})"', text)}
    assert set(FORMAT.findall(PAGE)) == named


def test_the_page_has_what_the_package_admits_and_what_was_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons = [each.rpartition(" ")[2] for each in project["classifiers"] if re.search(r":: 3\.\d", each)]
    assert project["requires-python"] == f">={pythons[0]}"
    assert f"Python {pythons[0]} to {pythons[-1]}, torch {TRIED}" in PAGE

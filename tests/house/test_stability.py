"""The page on stability names the formats, and the versions of Python and torch, that the code has."""

from __future__ import annotations

import re
import tomllib

from tests.support.commands import ROOT

PAGE = (ROOT / "docs" / "reference" / "stability.md").read_text()
FORMAT = re.compile(r"\bddp-[a-z]+/\d+\b")


def test_the_page_has_every_format() -> None:
    code = [file.read_text() for room in ("ddp_core", "ddp_lab") for file in (ROOT / room).rglob("*.py")]
    named = {found for text in code for found in re.findall(rf'"({FORMAT.pattern})"', text)}
    assert set(FORMAT.findall(PAGE)) == named


def test_the_page_has_the_bounds_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = (each for each in project["dependencies"] if re.match(r"torch\b", each))
    for first, last, bounds in (("3.11", "3.13", project["requires-python"]), ("2.11", "2.13", torch)):
        below = f"{last.split('.')[0]}.{int(last.split('.')[1]) + 1}"
        assert bounds.endswith(f">={first},<{below}")
        assert f"{first} to {last}" in PAGE

"""The page on the promise names the versions of Python and torch that the code has; tests/formats tests its formats."""

from __future__ import annotations

import re
import tomllib

from ddp_core.base.torch_names import TRIED
from tests.support.commands import ROOT

PAGE = (ROOT / "docs" / "reference" / "promise.md").read_text()


def test_the_page_has_what_the_package_admits_and_what_was_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons = [each.rpartition(" ")[2] for each in project["classifiers"] if re.search(r":: 3\.\d", each)]
    assert project["requires-python"] == f">={pythons[0]}"
    assert f"Python {pythons[0]} to {pythons[-1]}, torch {TRIED}" in PAGE

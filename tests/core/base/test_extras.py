"""What is missing is told with the extra that installs it; tests/house/test_missing_extras.py asks whole commands."""

from __future__ import annotations

import pytest

from ddp_core.base import extras
from ddp_core.base.extras import missing_extra, require
from tests.support.wording import refusing


def test_packages_that_are_missing_are_named_with_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"jinja2"}
    monkeypatch.setattr(extras, "find_spec", lambda module: module if module in there else None)
    require("a page", "report", "jinja2")
    with refusing():
        require("a page", "report")
    there.clear()
    with refusing():
        require("a page", "report")


def test_an_import_that_failed_is_told_where_an_extra_brings_the_module() -> None:
    found = missing_extra(ModuleNotFoundError(name="sklearn.datasets"))
    assert str(found) == "this needs scikit-learn: pip install 'samebits[digits]'"
    for other in (ModuleNotFoundError(name="mine"), ModuleNotFoundError(), ImportError(name="sklearn")):
        assert missing_extra(other) is None

"""Tells coverage.py which test file runs, in pytest's own process and in those that its tests start.

A pytest plugin of `make record-tests`. Every process records for itself, under the name of a test file. A program that
a test starts finds that name in its environment. A fork of multiprocessing's server has the server's environment, which
is that of the first test; it gets the name with the description of its work instead.
"""

from __future__ import annotations

import os
from multiprocessing import spawn
from typing import Any

from coverage import Coverage

TEST_FILE = "DDP_RECORDED_TEST"
"""The variable that names the test file for whose tests a process works; coverage's settings refer to it."""


def pytest_configure() -> None:
    """Send the name of the test file with every piece of work that multiprocessing gives to a new process."""
    described = spawn.get_preparation_data

    def described_with_test(name: str) -> dict[str, Any]:
        return {**described(name), "recorded_test": _Name(os.environ.get(TEST_FILE, ""))}

    spawn.get_preparation_data = described_with_test


def pytest_runtest_logstart(nodeid: str) -> None:
    """A test begins: what is executed from here on, until the next begins, counts for its file."""
    _record_for(nodeid.partition("::")[0])


class _Name:
    """A name that takes effect in the process that reads it."""

    def __init__(self, test_file: str) -> None:
        self.test_file = test_file

    def __setstate__(self, state: dict[str, str]) -> None:
        self.__dict__.update(state)
        _record_for(self.test_file)


def _record_for(test_file: str) -> None:
    os.environ[TEST_FILE] = test_file
    if recorder := Coverage.current():
        recorder.switch_context(test_file)
        # A fork of this process begins a recording of its own with these settings, from which it takes the name.
        recorder.set_option("run:context", test_file)

"""The rotation: the slow tests, longest unrun first, and the day on which each of them last passed.

It is a plugin of pytest (`-p tests.support.rotation`), and `make test-rotation` calls it. The days stand in
tests/rotation.json, which is committed. A session fails where a slow test has not passed for longer than two weeks.
"""

from __future__ import annotations

import json
import time
from datetime import date, timedelta
from zlib import crc32

import pytest

LONGEST = timedelta(days=14)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options that say how many of the slow tests run."""
    group = parser.getgroup("rotation")
    group.addoption("--rotation-seconds", type=float, default=float("inf"), help="begin no test after so many seconds")
    group.addoption("--rotation-slice", default="1/1", metavar="K/N", help="the K-th of N slices; or today: one of 7")


def pytest_configure(config: pytest.Config) -> None:
    """Keep the days in an object of this session."""
    config.pluginmanager.register(Rotation(config, date.today()))


class Rotation:
    """Chooses slow tests and notes which have passed.

    tests/rotation.json has the day from which tests without a day of their own are counted (`begun`), and the day on
    which each test last passed (`passed`), by node id.
    """

    def __init__(self, config: pytest.Config, today: date) -> None:
        self._root, self._today = config.rootpath, today
        self._days = self._root / "tests" / "rotation.json"
        known = json.loads(self._days.read_text())
        self._begun = date.fromisoformat(known["begun"])
        self._passed = {test: date.fromisoformat(day) for test, day in known["passed"].items()}
        self._seconds: float = config.getoption("--rotation-seconds")
        self._ends: float | None = None
        named: str = config.getoption("--rotation-slice")
        self._slice, self._slices = map(int, (f"{today.isoweekday()}/7" if named == "today" else named).split("/"))
        self._found: set[str] = set()
        self._failed: set[str] = set()
        self._overdue: list[str] = []

    def _day(self, test: str) -> date:
        return self._passed.get(test, self._begun)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Put what has not run for longest first, and leave out what belongs to other slices."""
        self._found = {item.nodeid for item in items}
        # Where only some files were collected, the tests of the others keep their days.
        files = {item.path for item in items}
        self._passed = {
            test: day
            for test, day in self._passed.items()
            if test in self._found or ((file := self._root / test.split("::")[0]) not in files and file.exists())
        }
        chosen, left_out = [], []
        for item in items:
            is_in_slice = crc32(item.nodeid.encode()) % self._slices == self._slice % self._slices
            (chosen if is_in_slice else left_out).append(item)
        config.hook.pytest_deselected(items=left_out)
        items[:] = sorted(chosen, key=lambda item: self._day(item.nodeid))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Pass over a test that would begin too late."""
        self._ends = self._ends or time.monotonic() + self._seconds
        return True if time.monotonic() > self._ends else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that passed today."""
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.passed and report.when == "call":
            self._passed[report.nodeid] = self._today

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write down the days, and fail where a test is overdue."""
        passed = {test: day for test, day in sorted(self._passed.items()) if test not in self._failed}
        days = {"begun": self._begun, "passed": passed}
        self._days.write_text(json.dumps(days, indent=1, default=str) + "\n")
        self._overdue = [test for test in self._found if self._today - passed.get(test, self._begun) > LONGEST]
        if self._overdue and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what is overdue."""
        never = len(self._found - self._passed.keys())
        terminalreporter.write_line(f"rotation: {len(self._found)} slow tests, {never} of them without a day")
        for test in sorted(self._overdue):
            terminalreporter.write_line(f"rotation: has not passed since {self._day(test)}: {test}")

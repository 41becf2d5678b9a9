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
        self._chosen: list[str] = []
        self._skipped: set[str] = set()

    def _day(self, test: str) -> date:
        return self._passed.get(test, self._begun)

    def _is_in_slice(self, test: str) -> bool:
        return (crc32(test.encode()) - self._slice) % self._slices == 0

    def _has_file(self, test: str) -> bool:
        return (self._root / test.split("::")[0]).exists()

    @property
    def _overdue(self) -> list[str]:
        """The chosen tests that have not passed for too long, but for those that cannot run on this machine."""
        return sorted(
            test for test in self._chosen if test not in self._skipped and self._today - self._day(test) > LONGEST
        )

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Put what has not run for longest first, and leave out what belongs to other slices."""
        config.hook.pytest_deselected(items=[item for item in items if not self._is_in_slice(item.nodeid)])
        items[:] = [item for item in items if self._is_in_slice(item.nodeid)]
        items.sort(key=lambda item: self._day(item.nodeid))
        self._chosen = [item.nodeid for item in items]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Pass over a test that would begin too late."""
        self._ends = self._ends or time.monotonic() + self._seconds
        return time.monotonic() > self._ends or None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that passed today, or that cannot run here."""
        if report.skipped:
            self._skipped.add(report.nodeid)
        elif report.passed and report.when == "call":
            self._passed[report.nodeid] = self._today

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write down the days, and fail where a test is overdue."""
        # Another session of tests may have written days into the file since this one has read it.
        known: dict[str, str] = json.loads(self._days.read_text())["passed"]
        passed = known | {test: str(day) for test, day in self._passed.items() if str(day) >= known.get(test, "")}
        days = {test: day for test, day in sorted(passed.items()) if self._has_file(test)}
        self._days.write_text(json.dumps({"begun": str(self._begun), "passed": days}, indent=1) + "\n")
        if self._overdue and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what is overdue."""
        tests, never, skipped = len(self._chosen), len(set(self._chosen) - self._passed.keys()), len(self._skipped)
        terminalreporter.write_line(f"rotation: {tests} slow tests, {never} without a day; {skipped} cannot run here")
        for test in self._overdue:
            terminalreporter.write_line(f"rotation: has not passed since {self._day(test)}: {test}")

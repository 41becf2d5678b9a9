"""Records what ran on this machine's GPUs, where the variable DDP_GPU_RECORD names a file: `make test-gpu` does."""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest

from benchmarks.record import record
from ddp_core.record.environment import describe_code

_BEGAN = time.monotonic()
_passed: list[str] = []
_failed: list[str] = []
_skipped: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count a test by its outcome; setup and teardown count where they fail or skip."""
    if report.failed:
        _failed.append(report.nodeid)
    elif report.skipped and isinstance(report.longrepr, tuple):
        _skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1
    elif report.when == "call":
        _passed.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the record; nothing where no test ran."""
    target = os.environ.get("DDP_GPU_RECORD")
    if target and (_passed or _failed):
        results = {
            "code": describe_code(),
            "seconds": round(time.monotonic() - _BEGAN),
            "passed": sorted(set(_passed) - set(_failed)),
            "failed": sorted(set(_failed)),
            "skipped": dict(_skipped),
        }
        print(f"\n{record('gpu_tests', 'make test-gpu', results, target)}")

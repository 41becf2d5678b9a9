"""Records what ran on this machine's GPUs: a line for each test as it ends, in the file that DDP_GPU_LINES names."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_lines import HEAD, LINES, append, head_of, place

_LAST_LINES = 12


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append a line where a test ends: by its call, or by a setup or teardown that fails or skips.

    Nothing is recorded without a GPU, nor in a worker of pytest-xdist, which hands its reports on.
    """
    target = os.environ.get(LINES)
    if target is None or "PYTEST_XDIST_WORKER" in os.environ or not (report.when == "call" or not report.passed):
        return
    if not torch.cuda.is_available():
        return
    line: dict[str, Any] = {"item": report.nodeid, "part": "tests", "outcome": report.outcome}
    if report.skipped and isinstance(report.longrepr, tuple):
        line["said"] = [report.longrepr[2].removeprefix("Skipped: ")]
    elif report.failed:
        line["said"] = _told(report.longreprtext)
    append(Path(target), _head(), line | {"seconds": round(report.duration, 1)})


def _told(text: str) -> list[str]:
    """The last lines of a failure that say what is wrong, and where that is."""
    lines = [line[:300] for line in text.splitlines() if line.strip()]
    return [*[line for line in lines if line.startswith("E  ")][-_LAST_LINES:], *lines[-1:]]


@functools.cache
def _head() -> dict[str, Any]:
    return json.loads(os.environ[HEAD]) if HEAD in os.environ else head_of(place())

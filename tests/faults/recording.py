"""pytest plugin: records for every test of the fault matrix whether it passed and how long it took.

DDP_FAULT_RECORDS=records python -m pytest -p tests.faults.recording TESTS
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.faults.matrix import RECORDS, rows_of


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write `test-<name>.json` with the rows that name the test, its outcome and its seconds."""
    folder, rows = os.environ.get(RECORDS), rows_of(report.nodeid)
    if folder and rows and (report.when == "call" or report.skipped):
        Path(folder).mkdir(parents=True, exist_ok=True)
        record = {"rows": rows, "test": report.nodeid, "result": report.outcome, "seconds": report.duration}
        target = Path(folder) / f"test-{re.sub(r'[^A-Za-z0-9]+', '-', report.nodeid)}.json"
        target.write_text(json.dumps(record) + "\n")

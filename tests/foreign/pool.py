"""Runs cases in processes of their own, some at a time, and gives their outcomes as they come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.foreign import driver
from tests.foreign.fleet import Case
from tests.support.pool import in_processes

BAD = {"SILENT", "FAULT", "HANG", "not tried"}
"""Outcomes that are faults of this project, or hide what might be one."""
_DIED = {"outcomes": {"single": "FAULT"}, "said": {"single": "the process that trains the case has died"}}


def outcomes(
    cases: Sequence[Case],
    workers: int,
    seconds: float = float("inf"),
    ways: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """What `driver.run` finds for each case, a large one alone; no case is begun after so many seconds.

    `ways` holds the layouts of a case by its key, where they are not all of them. `driver.load` comes before.
    """

    def train(case: Case) -> dict[str, Any]:
        return driver.run(case, (ways or {}).get(case.key, driver.COLUMNS))

    for case, found in in_processes(cases, train, workers, seconds, is_alone=lambda case: case.is_large):
        yield case, found or {**_DIED, "on": {}, "seconds": 0.0}

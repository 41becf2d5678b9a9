"""What the command asks of the processes of a script: one environment variable; and the file by which they answer."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

VARIABLE = "DDP_DIAGNOSE_TASK"
"""It holds the task, as JSON; without it nothing is traced."""


class Task(NamedTuple):
    """What a run is to show."""

    steps: int
    """How many optimizer steps are to be seen."""
    until: str = ""
    """What else is waited for: `epoch`, `saved`, or nothing."""
    given: str | None = None
    """How one process gets the batches of all ranks: `together`, `one by one`, or empty where it has its own. Where it
    is not None, ranks leave them, and nothing in a step is random, or of some samples alone (`union`)."""
    operations: bool = False
    """Whether what each operation of a forward has computed is to be noted."""
    batches: str = ""
    """The folder in which they are; empty for that of the run's own traces."""
    traces: str = ""
    """The folder of the traces."""
    roots: tuple[str, ...] = ()
    """The folders of the script's own code."""


@cache
def task() -> Task:
    """The task of this process."""
    return Task(**json.loads(os.environ[VARIABLE]))


def ended_file(traces: Path, process: int) -> Path:
    """What a process leaves among the traces when its program is over, before the interpreter clears away."""
    return traces / f"{process}.ended"

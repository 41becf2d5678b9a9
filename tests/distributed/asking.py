"""Ways in which a run is asked to stop: the command alone, its group, or every process of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import psutil

from tests.support.commands import Forked

Started = Forked | Popen[str]
Send = Callable[[Started, int], None]


def has_begun(output: Path) -> bool:
    """Whether a run below `output` has recorded a step."""
    return any('"kind": "step"' in file.read_text() for file in output.glob("*/*/metrics.jsonl"))


def to_the_command(started: Started, number: int) -> None:
    """Send the signal to the command alone."""
    os.kill(started.pid, number)


def to_its_group(started: Started, number: int) -> None:
    """Send the signal to the process group, as a terminal does on Ctrl-C."""
    os.killpg(started.pid, number)


def to_every_process(started: Started, number: int) -> None:
    """Send the signal to the launcher and all that it has started, as a scheduler does; the children first."""
    with contextlib.suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(started.pid)
        for process in [*reversed(launcher.children(recursive=True)), launcher]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

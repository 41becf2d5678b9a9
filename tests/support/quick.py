"""`ddp`, whose own processes are forks that have torch already, not new interpreters.

These are the trainings of `verify`, `verify-layouts` and `rehearse`, and the process that rehearses a resume.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_core import cli
from ddp_core.cli import training
from ddp_core.run import rehearsing, resumed_step


def main(words: Sequence[str]) -> int:
    """Run the command, in a process that `tests.support.commands.ddp` has started."""
    training.run_ddp = _run_ddp
    rehearsing.start_interpreter = _start_fork  # type: ignore[assignment]
    return cli.main(words)


def _run_ddp(words: list[str], limit: float | None = None) -> tuple[int, str]:
    with tempfile.TemporaryDirectory() as scratch:
        errors = Path(scratch) / "errors"
        errors.touch()
        child = multiprocessing.get_context("fork").Process(target=_enter, args=(words, errors))
        child.start()
        child.join(limit)
        if child.exitcode is None:
            child.kill()
            raise subprocess.TimeoutExpired("ddp", limit or 0.0)
        return child.exitcode, errors.read_text()


def _enter(words: list[str], errors: Path) -> None:
    os.dup2(os.open(errors, os.O_WRONLY), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(cli.main(words))


class _start_fork:
    """A fork in the place of a fresh interpreter, with the methods of subprocess.Popen that are used."""

    def __init__(self, folder: Path) -> None:
        self._child = multiprocessing.get_context("fork").Process(target=_rehearse, args=(folder,))
        self._child.start()
        self.kill = self._child.kill

    def wait(self, timeout: float | None = None) -> Any:
        """The exit code; raises subprocess.TimeoutExpired."""
        self._child.join(timeout)
        if self._child.exitcode is None:
            raise subprocess.TimeoutExpired("rehearsal", timeout or 0.0)
        return self._child.exitcode


def _rehearse(folder: Path) -> None:
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    sys.exit(resumed_step.main(folder))

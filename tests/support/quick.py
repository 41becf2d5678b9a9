"""`ddp`, whose own processes are forks that have torch already, not new interpreters.

These are the trainings of `verify` and `verify-layouts`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddp_core import cli
from ddp_core.cli import training
from ddp_core.distributed import children


def main(words: Sequence[str]) -> int:
    """Run the command, in a process that `tests.support.commands.ddp` has started."""
    children.Children.ddp = _run_ddp  # type: ignore[method-assign]
    training.start_ddp = _StartedFork  # type: ignore[assignment, misc]
    return cli.main(words)


def _run_ddp(_: children.Children, words: Sequence[str]) -> children.Ended:
    with tempfile.TemporaryDirectory() as scratch:
        output, errors = Path(scratch) / "output", Path(scratch) / "errors"
        child = multiprocessing.get_context("fork").Process(target=_enter, args=(words, output, errors))
        child.start()
        child.join()
        assert child.exitcode is not None
        return children.Ended(child.exitcode, output.read_text(), errors.read_text())


def _enter(words: Sequence[str], output: Path, errors: Path) -> None:
    for number, file in ((1, output), (2, errors)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    sys.exit(cli.main(words))


class _StartedFork:
    """A fork in the place of a `ddp` of its own, with the methods of subprocess.Popen that are used."""

    def __init__(self, words: list[str], variables: Mapping[str, str], is_quiet: bool) -> None:
        self._child = multiprocessing.get_context("fork").Process(
            target=_become, args=(words, dict(variables), is_quiet)
        )
        self._child.start()

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._child.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal, as long as it runs."""
        if self._child.is_alive() and self._child.pid is not None:
            os.kill(self._child.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)


def _become(words: list[str], variables: dict[str, str], is_quiet: bool) -> None:
    os.setpgid(0, 0)
    os.environ |= variables
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    if is_quiet:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(cli.main(words))

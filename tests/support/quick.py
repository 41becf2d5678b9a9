"""`ddp`, whose own trainings (`verify`, `verify-layouts`) are forks that have torch already, not new interpreters."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ddp_core import cli
from ddp_core.cli import training


def main(words: Sequence[str]) -> int:
    """Run the command, in a process that `tests.support.commands.ddp` has started."""
    training.run_ddp = _run_ddp
    return cli.main(words)


def _run_ddp(words: list[str]) -> tuple[int, str]:
    with tempfile.TemporaryDirectory() as scratch:
        errors = Path(scratch) / "errors"
        errors.touch()
        child = multiprocessing.get_context("fork").Process(target=_enter, args=(words, errors))
        child.start()
        child.join()
        assert child.exitcode is not None
        return child.exitcode, errors.read_text()


def _enter(words: list[str], errors: Path) -> None:
    os.dup2(os.open(errors, os.O_WRONLY), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(cli.main(words))

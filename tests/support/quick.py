"""`ddp`, whose own processes are forks that have torch already, not new interpreters.

These are the trainings of `verify` and `verify-layouts`.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ddp_core import cli
from ddp_core.distributed import children


def main(words: Sequence[str]) -> int:
    """Run the command, in a process that `tests.support.commands.ddp` has started."""
    children.Children.ddp = _run_ddp  # type: ignore[method-assign]
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

"""What a `ddp train` owes to the Python program that started it through `ddp_core.train`.

It tells that program where its run directory is, and it saves and stops when that program has died: nobody would see
it train on. Two variables of the environment say who the program is, so that the words of the command, which a run
records, are those of any other run.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from ddp_core.base.files import replace_file
from ddp_core.base.process import die_with_parent

_CALLER = "DDP_CALLER"
_RUN_FILE = "DDP_RUN_FILE"


def caller_variables(run_file: Path) -> dict[str, str]:
    """The variables by which a `ddp train` that this process starts knows its caller.

    `run_file`: where it shall write the path of its run directory.
    """
    return {_CALLER: str(os.getpid()), _RUN_FILE: str(run_file)}


def stop_with_caller() -> None:
    """Have the kernel ask this process to save and stop (SIGTERM) when its caller dies; does nothing without a caller.

    For the process that the caller started, and not for workers, which end with their launcher.
    """
    if os.environ.get(_CALLER) == str(os.getppid()):
        die_with_parent(signal.SIGTERM)


def tell_caller(directory: Path) -> None:
    """Tell the caller where the run directory is, as an absolute path; does nothing without a caller."""
    if run_file := os.environ.get(_RUN_FILE):
        # A caller that is ending may have removed the file's folder already.
        with contextlib.suppress(OSError):
            replace_file(Path(run_file), str(directory.absolute()))

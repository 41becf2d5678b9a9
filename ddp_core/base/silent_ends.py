"""An end of this process with exit code 0 in mid-training, which is no exception and would look like success.

`os._exit(0)` is one, and so is SystemExit where C code calls Python: Python then ends the process from within.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType

from ddp_core.base.errors import ExitCode
from ddp_core.base.user_code import INSTEAD

Tell = Callable[[str], object]

_exit = os._exit
_told: list[Tell] = []
_process = 0
"""The process that is within a block: what is forked from it may end as it likes."""


@contextlib.contextmanager
def no_silent_end(tell: Tell) -> Iterator[None]:
    """A block in which this process does not end with exit code 0: it calls `tell` with one line, and ends with 2.

    Of blocks within each other, the innermost is called first. What C code ends by the system's own `_exit` is out of
    its reach.
    """
    global _process
    if _process != os.getpid():
        _told.clear()
        _process = os.getpid()
    if not _told:
        os._exit = _leave  # type: ignore[assignment]
        atexit.register(_at_exit)
    _told.append(tell)
    try:
        yield
    finally:
        _told.remove(tell)
        if not _told:
            os._exit = _exit
            atexit.unregister(_at_exit)


def _leave(status: int) -> None:
    if status == 0 and _is_within():
        _end(sys._getframe(1))
    _exit(status)


def _at_exit() -> None:
    # Python has not left the block, so that C code ends the process: its caller is still the newest frame.
    if _is_within():
        _end(sys._getframe(1))


def _is_within() -> bool:
    return bool(_told) and os.getpid() == _process


def _end(caller: FrameType) -> None:
    line = (
        f"your code ended the process at {caller.f_code.co_filename}:{caller.f_lineno} with exit code 0, so training "
        f"is not finished; {INSTEAD}"
    )
    for tell in reversed(_told):
        with contextlib.suppress(Exception):
            tell(line)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    _exit(ExitCode.BAD_INPUT)

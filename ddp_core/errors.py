"""How everything ends: exit codes, and the one exception that is said without a traceback."""

from __future__ import annotations

import difflib
import errno
import sys
import traceback
from collections.abc import Callable, Iterable
from enum import IntEnum
from functools import wraps
from pathlib import Path
from typing import ParamSpec

_P = ParamSpec("_P")
_INTERRUPTED = 130


class ExitCode(IntEnum):
    """Exit codes of every `ddp` command, worker and container."""

    DONE = 0
    BAD_INPUT = 2
    NO_CHECKPOINT = 3
    RESOURCES = 4
    NUMERICS = 5
    PEERS_LOST = 6
    INTERNAL = 70
    """A fault of this program (EX_SOFTWARE in sysexits.h)."""
    STOPPED = 75


class UserError(Exception):
    """Something the user can mend: says what, where and what to do now.

    `exit_code` is what the process that meets it ends with.
    """

    def __init__(self, message: str, exit_code: int = ExitCode.BAD_INPUT) -> None:
        super().__init__(message)
        self.exit_code = ExitCode(exit_code)

    def __reduce__(self) -> tuple[type[UserError], tuple[str, int]]:
        return (type(self), (str(self), int(self.exit_code)))


def is_full(error: BaseException) -> bool:
    """Whether a write failed for want of room: disk, quota, or a limit on the size of files."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def no_room(place: Path, error: BaseException) -> UserError:
    """What the user is told about it (4)."""
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return UserError(
        f"disk full: {reason} in {place}; free some space and continue with --resume auto", ExitCode.RESOURCES
    )


def internal(error: BaseException) -> str:
    """What the user is told about a fault of this program."""
    return f"{type(error).__name__}: {error}; this is a fault of ddp itself: please report it with the lines above"


def said_by(speaker: str) -> Callable[[Callable[_P, int]], Callable[_P, int]]:
    """For a command's main: a UserError is said in one line and gives its exit code, a want of memory 4, an interrupt
    130.

    Any other exception is a fault of the program: it is shown with its traceback, and the exit code is 70.
    """

    def decorate(main: Callable[_P, int]) -> Callable[_P, int]:
        @wraps(main)
        def guarded(*words: _P.args, **named: _P.kwargs) -> int:
            try:
                return main(*words, **named)
            except UserError as error:
                print(f"{speaker}: error: {error}", file=sys.stderr, flush=True)
                return error.exit_code
            except KeyboardInterrupt:
                print(f"{speaker}: interrupted", file=sys.stderr, flush=True)
                return _INTERRUPTED
            except MemoryError as error:
                print(f"{speaker}: error: out of memory: {error}; give it more", file=sys.stderr, flush=True)
                return ExitCode.RESOURCES
            except Exception as error:
                traceback.print_exc()
                print(f"{speaker}: error: {internal(error)}", file=sys.stderr, flush=True)
                return ExitCode.INTERNAL

        return guarded

    return decorate


def nearest_name(wrong: str, known: Iterable[str]) -> str:
    """' - did you mean X?' for the nearest known name, or the list of all when none is near."""
    names = sorted(known)
    close = difflib.get_close_matches(wrong, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"

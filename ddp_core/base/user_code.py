"""Whose code an exception is from: boundaries around the few places where the user's functions are called.

Whatever comes out of `with user_code("your model"):` is the user's, and nothing else is. Hooks of ours that torch calls
in the midst of the user's model are marked with `our_code`; the boundary that an exception crosses first decides.

No code of the user ends a run in silence: what would end the process there, such as `sys.exit()`, becomes LeftEarly,
and a StopIteration becomes a UserError; an end with exit code 0 is told (`no_silent_end`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

from ddp_core.base.errors import ExitCode, UserError, one_line

_P = ParamSpec("_P")
_T = TypeVar("_T")
MODULE_PREFIX = "ddp_experiment_"
"""With it begin the names of the modules that experiment files become."""
_MARK = "_ddp_crossed"
_OURS = ""
INSTEAD = "raise an ordinary exception to end a run for an error, or make it shorter with --set max_steps=N"
"""What to do instead of leaving in the midst of a run."""


class LeftEarly(Exception):
    """The user's code raised what ends a program without being an error, such as SystemExit: training is unfinished.

    The message is one line with what was raised, where, and what to do instead.
    """


class RaisedElsewhere(Exception):
    """The user's code raised an exception in another process; the message is one line with where and what."""


def told(error: BaseException) -> str:
    """'file:line: ValueError: …', in one line; the place is the exception's deepest in the experiment's own file."""
    places = [
        f"{frame.f_code.co_filename}:{line}: "
        for frame, line in traceback.walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__")).startswith(MODULE_PREFIX)
    ]
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    return f"{places[-1] if places else ''}{type(error).__name__}: {' '.join(f'{error}{notes}'.split())}"


@dataclass
class user_code(contextlib.AbstractContextManager["user_code"]):
    """A block in which the user's functions run; `what` names them: "your model". One object may be entered often."""

    what: str

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        if is_way_out(error):
            raise left_early(error, self.what).with_traceback(trace) from None
        if isinstance(error, StopIteration):  # any iterator or generator on its way would take it for its own
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise UserError(
                f"{frame.filename}:{frame.lineno}: {self.what} raised StopIteration, as next() does at an iterator's "
                "end: begin the iterator anew there, or raise another exception"
            ).with_traceback(trace) from None
        _mark(error, self.what)


def is_way_out(error: BaseException) -> bool:
    """Whether the user's code raised it to leave: SystemExit, KeyboardInterrupt, or an exception of that rank."""
    # A KeyboardInterrupt may also be a true Ctrl-C, but only while Python's own handler answers to SIGINT; a command
    # that trains has other handlers.
    if isinstance(error, KeyboardInterrupt):
        return signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    return not isinstance(error, Exception | GeneratorExit)


def left_early(error: BaseException, what: str) -> LeftEarly:
    """The exception in the place of one that `is_way_out`; `what` names the user's function that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    words = one_line(error)
    early = LeftEarly(
        f"{what} left{place} by {type(error).__name__}{f': {words}' if words else ''}, so training is not finished; "
        f"{INSTEAD}"
    )
    _mark(early, what)
    return early


@contextlib.contextmanager
def no_way_out(what: str) -> Iterator[None]:
    """What would end the process in this block, such as `sys.exit()` in code of the user, becomes LeftEarly."""
    try:
        yield
    except BaseException as error:
        if is_way_out(error):
            raise left_early(error, what).with_traceback(error.__traceback__) from None
        raise


def our_code(hook: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a hook of ours that runs within the user's code: an exception that it raises is a fault of ours."""

    @wraps(hook)
    def marked(*words: _P.args, **named: _P.kwargs) -> _T:
        try:
            return hook(*words, **named)
        except (ValueError, RuntimeError):
            raise  # it says what cannot be done with the user's model
        except Exception as error:
            _mark(error, _OURS)
            raise

    return marked


def users(error: BaseException) -> str | None:
    """Which of the user's functions raised the exception, such as "your model"; None where none of them did."""
    return getattr(error, _MARK, None) or None


def _mark(error: BaseException, what: str) -> None:
    if not hasattr(error, _MARK):
        setattr(error, _MARK, what)


_exit = os._exit
_tellers: list[Callable[[str], object]] = []
_process = 0
"""The process that is within a block: what is forked from it may end as it likes."""


@contextlib.contextmanager
def no_silent_end(tell: Callable[[str], object]) -> Iterator[None]:
    """A block in which this process does not end with exit code 0: it calls `tell` with one line, and ends with 2."""
    # `os._exit(0)` is such an end in mid-training, which is no exception and would look like success; so is SystemExit
    # where C code calls Python: Python then ends the process from within. Of blocks within each other, the innermost is
    # called first. What C code ends by the system's own `_exit` is out of its reach.
    global _process
    if _process != os.getpid():
        _tellers.clear()
        _process = os.getpid()
    if not _tellers:
        os._exit = _leave  # type: ignore[assignment]
        atexit.register(_at_exit)
    _tellers.append(tell)
    try:
        yield
    finally:
        _tellers.remove(tell)
        if not _tellers:
            os._exit = _exit
            atexit.unregister(_at_exit)


def _leave(status: int) -> None:
    if status == 0:
        _end_within(sys._getframe(1))
    _exit(status)


def _at_exit() -> None:
    # Python has not left the block, so that C code ends the process: its caller is still the newest frame.
    _end_within(sys._getframe(1))


def _end_within(caller: FrameType) -> None:
    """End the process with 2 where it is within a block."""
    if not _tellers or os.getpid() != _process:
        return
    line = (
        f"your code ended the process at {caller.f_code.co_filename}:{caller.f_lineno} with exit code 0, so training "
        f"is not finished; {INSTEAD}"
    )
    for tell in reversed(_tellers):
        with contextlib.suppress(Exception):
            tell(line)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    _exit(ExitCode.BAD_INPUT)

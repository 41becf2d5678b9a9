"""How a command ends: whatever it raises becomes one line and an exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

from ddp_core.base.errors import ExitCode, UserError, in_words, internal
from ddp_core.base.extras import missing_extra
from ddp_core.base.refusals import refusal
from ddp_core.base.shown import shown

_P = ParamSpec("_P")
_INTERRUPTED = 130
_CLEAR_LINE = "\r\x1b[K"


def take_off_bar() -> None:
    """Clear the line of the terminal, if standard error is one: a bar of a process that was killed may stand on it."""
    if sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        sys.stderr.write(_CLEAR_LINE)


def said_by(speaker: str) -> Callable[[Callable[_P, int]], Callable[_P, int]]:
    """Decorate a command's main function: exceptions become messages from `speaker`, and exit codes.

    A UserError is printed in one line and gives its own exit code, a missing extra gives 2, what the system refuses
    gives 4, and an interrupt gives 130. Any other exception is a fault of this program: it is printed with its
    traceback, and gives 70.
    """

    def decorate(main: Callable[_P, int]) -> Callable[_P, int]:
        @wraps(main)
        def guarded(*words: _P.args, **named: _P.kwargs) -> int:
            try:
                return main(*words, **named)
            except KeyboardInterrupt:
                take_off_bar()
                print(f"{speaker}: interrupted", file=sys.stderr, flush=True)
                return _INTERRUPTED
            except Exception as error:
                take_off_bar()
                known = error if isinstance(error, UserError) else missing_extra(error) or refusal(error)
                if known is None:
                    traceback.print_exc()
                    known = UserError(internal(error), ExitCode.INTERNAL)
                said = shown(in_words(known.exit_code, str(known)), lines=True)
                print(f"{speaker}: {said}", file=sys.stderr, flush=True)
                return known.exit_code

        return guarded

    return decorate

"""Exit codes, and the one exception that the user sees as a line of text without a traceback."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from enum import IntEnum

_FEWEST_LETTERS, _MOST_NAMES = 3, 3
"""How many letters a beginning of a name must have to be completed, and how many names one line offers."""


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


DIFFERENT = 1
"""Exit code of commands that compare, where things are not the same. No worker ends with it: torch's own ends are 1."""


class UserError(Exception):
    """An error that the user can mend: its message says what is wrong, where, and what to do now.

    A process that meets this error ends with `exit_code`. Docstrings write UserError (4) for an error with exit code 4.
    """

    def __init__(self, message: str, exit_code: int = ExitCode.BAD_INPUT) -> None:
        super().__init__(message)
        self.exit_code = ExitCode(exit_code)

    def __reduce__(self) -> tuple[type[UserError], tuple[object, ...]]:
        return (type(self), (str(self), int(self.exit_code)))


def first_line(error: BaseException) -> str:
    """The first line of the error's message, for libraries that put a trace or advice behind it."""
    return str(error).strip().partition("\n")[0]


def one_line(error: BaseException) -> str:
    """The error's whole message in one line."""
    return " ".join(str(error).split())


def internal(error: BaseException) -> str:
    """The message for a fault of this program."""
    fault = "this is a fault of ddp itself: please report it with the lines above"
    return f"{type(error).__name__}: {one_line(error)}; {fault}"


def in_words(exit_code: int, message: str) -> str:
    """What is printed at the end of a run: `error: …`, but `stopped: …` for a run that was asked to stop."""
    if exit_code == ExitCode.STOPPED:
        return f"stopped: {message.removeprefix('stopped ')}"
    return f"error: {message}"


def nearest_name(wrong: str, known: Iterable[str]) -> str:
    """'did you mean X?' for the nearest known names, or the list of all names when none is near."""
    names = sorted(known)
    near = near_names(wrong, names)
    return f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"


def near_names(wrong: str, names: Sequence[str], likeness: float = 0.5) -> list[str]:
    """Those of the names, three at most, that may have been meant by the wrong name.

    They are the names whose last part it is (`lr` for `optimizer.lr`) or spells out (`learning_rate`); else those that
    begin with it; else the one spelled most alike, with a difflib ratio of at least `likeness`.
    """
    words = [word for word in re.split("[-_]", wrong) if word]
    last = {name: name.rpartition(".")[2] for name in names}
    near = [name for name in names if last[name] in (wrong, "".join(word[0] for word in words))]
    if not near and len("".join(words)) >= _FEWEST_LETTERS:
        near = [name for name in names if name.startswith(wrong) or last[name].startswith(wrong)]
    return near if 1 <= len(near) <= _MOST_NAMES else difflib.get_close_matches(wrong, names, n=1, cutoff=likeness)

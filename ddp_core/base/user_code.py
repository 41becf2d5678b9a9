"""Whose code an exception is from: boundaries around the few places where the user's functions are called.

Whatever comes out of `with user_code("your model"):` is the user's, and nothing else is. Hooks of ours that torch calls
in the midst of the user's model are marked with `our_code`; the boundary that an exception crosses first decides.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import wraps
from types import TracebackType
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
_MARK = "_ddp_crossed"
_OURS = ""


@dataclass
class user_code(AbstractContextManager["user_code"]):
    """A block in which the user's functions run; `what` names them: "your model". One object may be entered often."""

    what: str

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            _mark(error, self.what)


def our_code(hook: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a hook of ours that runs within the user's code: an exception that it raises is a fault of ours.

    A ValueError or RuntimeError is not: it says what cannot be done with the user's model.
    """

    @wraps(hook)
    def marked(*words: _P.args, **named: _P.kwargs) -> _T:
        try:
            return hook(*words, **named)
        except (ValueError, RuntimeError):
            raise
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

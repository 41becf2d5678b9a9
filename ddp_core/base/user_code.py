"""Whose code an exception is from: boundaries around the few places where the user's functions are called.

Whatever comes out of `with user_code("your model"):` is the user's, and nothing else is. Hooks of ours that torch calls
in the midst of the user's model are marked with `our_code`; the boundary that an exception crosses first decides.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")
_MARK = "_ddp_crossed"
_OURS = ""


class user_code:
    """A block in which functions of the user run; `what` names them: "your model". May be entered again and again."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            _mark(error, self._what)


def our_code(hook: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a hook of ours that runs within the user's code: what it raises is a fault of ours.

    Its ValueError and RuntimeError are not: they say what cannot be done with the user's model.
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
    """What of the user's raised the exception, such as "your model"; None where it is no code of the user's."""
    return getattr(error, _MARK, None) or None


def _mark(error: BaseException, what: str) -> None:
    if not hasattr(error, _MARK):
        setattr(error, _MARK, what)

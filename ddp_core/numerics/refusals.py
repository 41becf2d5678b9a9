"""Operations that portable numerics cannot have: each raises one line that names it and where it is used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from torch import nn

from ddp_core.base.errors import UserError

_LEAST_SQUARES = ("torch.linalg.lstsq", "its bits depend on where its tensors lie in memory; use torch.linalg.qr")
REFUSED = {"linalg_lstsq": _LEAST_SQUARES, "linalg_lstsq.out": _LEAST_SQUARES}
"""By the dispatcher's name of an operation: the name that users know, and why it is refused and what to do instead.

All of them were measured to differ: docs/reference/portable-numerics.md.
"""


def refuse(operation: str) -> Callable[..., NoReturn]:
    """A kernel for a refused operation: it raises UserError."""
    name, reason = REFUSED[operation]

    def kernel(*_: Any, **__: Any) -> NoReturn:
        raise UserError(
            f"{name} in {_place()} is not portable: {reason}. Or train with --numerics native, whose bits belong to "
            "one kind of CPU"
        )

    return kernel


def _place() -> str:
    """Where the operation was called: in which module of the model, in a backward pass, or in which line."""
    modules: list[nn.Module] = []
    line = None
    for frame in _frames():
        names = frame.f_code
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            modules += [owner] if not modules or modules[-1] is not owner else []
        elif names.co_name == "backward" and _is_of_torch(frame) and not modules:
            return "the backward pass"
        if line is None and not _is_of_torch(frame) and Path(names.co_filename) != Path(__file__):
            line = f"{names.co_filename}, line {frame.f_lineno}"
    if modules:
        return _named(modules[0], modules[-1])
    return line or "code outside of Python"


def _frames() -> Iterator[FrameType]:
    """The frames of Python's stack, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_of_torch(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "torch"


def _named(module: nn.Module, whole: nn.Module) -> str:
    """The module's name within the whole model, and its class."""
    name = next((name for name, each in whole.named_modules() if each is module), "")
    kind = type(module).__name__
    return f"module {name} ({kind})" if name else f"module {kind}"

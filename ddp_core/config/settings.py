"""Single values of settings: as `--set` writes them, and in the type of the value that they replace."""

from __future__ import annotations

import json
from typing import Any

from ddp_core.base.errors import UserError


def setting_text(value: Any) -> str:
    """The value as `--set` reads it: JSON, but text that would be read as text stands as it is.

    Raises TypeError or ValueError for what JSON does not have: NaN, infinity, dates.
    """
    if isinstance(value, str) and value.lower() not in ("none", "true", "false"):
        try:
            json.loads(value)
        except ValueError:
            return value
    return json.dumps(value, allow_nan=False)


def typed_like(old: Any, new: Any, name: str) -> Any:
    """`new` in the type of the option's present value, because options of components have no schema."""
    if old is None or new is None:
        return new
    if isinstance(old, bool) or isinstance(new, bool):
        fits = isinstance(old, bool) and isinstance(new, bool)
    elif isinstance(old, float):
        fits = isinstance(new, int | float)
        new = float(new) if fits else new
    else:
        fits = isinstance(new, type(old))
    if not fits:
        raise UserError(f"--set {name}={new}: expected {type(old).__name__}, as in {name}={json.dumps(old)}")
    return new

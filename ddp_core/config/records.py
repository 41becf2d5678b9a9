"""What the records of this package share: base class, one-line text of their errors, dotted names, common types."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from ddp_core.base.errors import UserError

Reduction = Literal["exact", "plain"]
Numerics = Literal["native", "portable"]
MemoryFormat = Literal["contiguous", "channels_last"]


class Frozen(BaseModel):
    """A record that cannot change and accepts no unknown field."""

    # Validators are built when they are first needed: `ddp train --help` reads the fields, and needs none.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)


def explain(error: ValidationError) -> str:
    """Pydantic's findings in one line."""
    findings = []
    for item in error.errors():
        place = ".".join(str(part) for part in item["loc"])
        text = item["msg"].removeprefix("Value error, ")
        findings.append(f"{place}: {text}" if place else text)
    return "; ".join(findings)


def dotted(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A record's nested values under dotted names, as `--set` takes them: `model.options.width` is `model.width`."""
    flat: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            flat |= dotted(value, prefix if prefix and name == "options" else f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


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

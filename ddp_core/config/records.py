"""What the records of this package share: base class, one-line text of their errors, dotted names, common types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

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

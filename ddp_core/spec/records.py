"""What the records of this package share: their base class, a one-line text for their errors, and common types."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

Reduction = Literal["exact", "plain"]


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

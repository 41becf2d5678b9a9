"""What a record says of a run that a callback has ended early, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def how_it_ended(early: Mapping[str, Any] | None) -> str | None:
    """The field `ended_early` of a record in words; None for a run that was trained to its last step."""
    return None if early is None else f"ended early at step {early['step']} of {early['of']}: {early['reason']}"

"""Which settings a fork may change: not those that say which sample comes when, or what the optimizer's state means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ORDER = ("seed", "global_batch_size", "last_batch", "data")
_STATE = ("optimizer.name", "optimizer.implementation")


def refused_changes(changes: Mapping[str, tuple[Any, Any]]) -> str | None:
    """The first of these differences that a fork may not have, in words; None where it may have them all.

    `changes`: the value in the parent's record and the value now, by names that `--set` knows.
    """
    for name, (there, here) in changes.items():
        if name in _STATE or name.partition(".")[0] in _ORDER:
            what = "what the optimizer's state means" if name in _STATE else "which samples come when"
            return f"{name} is {_shown(there)} there and {_shown(here)} here, which changes {what}"
        if name == "best":
            return f"best is {_shown(there)} there and {_shown(here)} here: the best value so far is of another figure"
        if name == "ema_decay" and there is None:
            return "ema_decay is not set there, so its checkpoints hold no averaged weights"
    return None


def _shown(value: Any) -> str:
    return "not set" if value is ... else repr(value)

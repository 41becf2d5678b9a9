"""What a record says of its run, in words: what is not promised, whether the promise was broken, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddp_core.base.errors import UserError
from ddp_core.config.options import Options


def not_promised(text: str, options: Options) -> str:
    """The warning that says why the same bits are not promised; with `--guard strict` raises it as UserError (2)."""
    if options.guard == "strict":
        raise UserError(f"{text}. --guard strict refuses what is not promised: mend that, or leave --guard strict out")
    return f"warning: {text}"


def broken_promise(record: Mapping[str, Any]) -> str | None:
    """`promise broken in step N`, where a check found other bits and the run went on; None where none did.

    The weights of such a run are no reference for any other run.
    """
    found = record.get("promise_broken")
    return None if not found else f"promise broken in step {found.get('step')}"


def what_broke_it(record: Mapping[str, Any]) -> str | None:
    """The words of `broken_promise`, and what the check found."""
    words = broken_promise(record)
    return None if words is None else f"{words}: {record['promise_broken'].get('what')}"


def was_rehearsed(record: Mapping[str, Any]) -> bool:
    """Whether steps of the run were tried elsewhere before it began, with the same bits."""
    guards = [attempt.get("guard") or {} for attempt in record.get("attempts") or []]
    return any(str(guard.get("rehearsal", "")).startswith("rehearsed ") for guard in guards)


def how_it_ended(record: Mapping[str, Any]) -> str | None:
    """Where a callback has ended the run early, in words; None for a run that was trained to its last step."""
    early = record.get("ended_early")
    return None if early is None else f"ended early at step {early['step']} of {early['of']}: {early['reason']}"

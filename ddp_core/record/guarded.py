"""The guard in words: what is not promised, whether the promise was broken in a run, and what the checks cost."""

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


def guard_figures(record: Mapping[str, Any]) -> str | None:
    """The guard of the last attempt: its mode, its checks, their time. None where the record does not tell."""
    guard = (record.get("attempts") or [{}])[-1].get("guard")
    if not isinstance(guard, Mapping) or "mode" not in guard:
        return None
    if guard["mode"] == "off":
        return "off"
    parts = [guard["mode"]]
    spent, whole = sum(guard.get("seconds", {}).values()), (record.get("result") or {}).get("seconds")
    parts.append(f"{spent:.2f} s" + (f", {100 * spent / whole:.1f} % of the run" if whole else ""))
    parts += [f"{kind}: {guard[kind]}" for kind in ("rehearsal", "witness") if guard.get(kind) is not None]
    return "; ".join(parts)


def was_rehearsed(record: Mapping[str, Any]) -> bool:
    """Whether steps of the run were tried elsewhere before it began, with the same bits."""
    guards = [attempt.get("guard") or {} for attempt in record.get("attempts") or []]
    return any(str(guard.get("rehearsal", "")).startswith("rehearsed ") for guard in guards)

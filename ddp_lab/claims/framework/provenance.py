"""Whether a rule was there before what it judges: the time of its last commit beside the start of the run."""

from __future__ import annotations

import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

RuleCommit = dict[str, Any]
_STATISTICS = Path(__file__).with_name("statistics.py")


def rule_commit(file: Path | None, shared: Path = _STATISTICS) -> RuleCommit | None:
    """The commit that last changed a claim's file or `shared`, the test of "beyond noise".

    `dirty` says whether one of the two has changes that no commit has; `committed_at` is the time of the commit. None
    where git does not know the file.
    """
    if file is None:
        return None
    files = ("--", str(file), str(shared))
    known = _git(file.parent, "log", "-1", "--format=%H %cI", *files)
    if not known:
        return None
    commit, _, committed_at = known.partition(" ")
    return {
        "commit": commit,
        "committed_at": committed_at,
        "dirty": _git(file.parent, "status", "--porcelain", *files) != "",
    }


def doubt(record: dict[str, Any]) -> str:
    """Why this record cannot show that its rule was there before it was measured; empty where it does."""
    rule, began = record.get("rule_commit"), (record.get("run") or {}).get("started_at")
    if not rule or not began:
        return "it does not say which commit its rule is of, and when its run began"
    if rule["dirty"]:
        return "its rule had changes that were not committed"
    if datetime.fromisoformat(rule["committed_at"]) >= datetime.fromisoformat(began):
        return f"its rule is of {rule['committed_at']}, and its run began at {began}"
    return ""


def _git(place: Path, *words: str) -> str | None:
    try:
        found = subprocess.run(
            ["git", "-C", str(place), *words], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()

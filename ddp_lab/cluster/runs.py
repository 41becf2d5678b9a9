"""The run directories that a cluster's run is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ddp_core.record.directory import find_runs


class Planned(NamedTuple):
    """What `ddp train` will train: the experiment's digest, and by which rules of portable numerics."""

    digest: str
    rules: int | None
    """None: native numerics."""


def find_baseline(output: Path, planned: Planned) -> Path | None:
    """The newest completed single-process CPU run of the same experiment with the same numerics."""
    found = [
        directory.path
        for directory, record in find_runs(output)
        if record.get("status") == "completed"
        and record.get("experiment_sha256") == planned.digest
        and (record["layout"]["kind"], record["layout"]["device"]) == ("single", "cpu")
        and (record.get("fingerprint") or {}).get("numerics_rules") == planned.rules
    ]
    return found[-1] if found else None


def find_launched(output: Path, launch_id: str) -> Path | None:
    """The run that this launch made."""
    found = [directory.path for directory, record in find_runs(output) if record.get("launch_id") == launch_id]
    return found[-1] if found else None


def settings_of(options: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Those of the `options` (as on a command line) whose name is one of `names`, each with its value."""
    kept: list[str] = []
    words = iter(options)
    for word in words:
        name, equals, _ = word.partition("=")
        if name in names:
            kept += [word] if equals else [word, *[value for value in [next(words, None)] if value is not None]]
    return tuple(kept)

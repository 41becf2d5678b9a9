"""Whether a run ended with the published weights of its experiment, which every x86-64 CPU with AVX2 computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ddp_core.base.errors import UserError
from ddp_core.cli.prepare import load_with_settings
from ddp_core.experiment.file import INSTALLED
from ddp_lab.probe.published import Published


class Beside(NamedTuple):
    """A run's weights beside the published ones of its experiment."""

    is_same: bool
    line: str


def beside_published(record: Mapping[str, Any], table: Published) -> Beside | None:
    """What is to be said of a completed run (its run.json); None where nothing is published for what it trained.

    Published is what a shipped experiment ends with, with its own settings and by the table's rules.
    """
    name = record["experiment"]["name"]
    expected = table.runs.get(name)
    is_comparable = record["fingerprint"].get("numerics_rules") == table.rules
    if expected is None or not is_comparable or record["options"]["reduction"] != "exact":
        return None
    try:
        shipped = load_with_settings(str(INSTALLED / f"{name}.py"), []).experiment
    except UserError:
        return None
    if record["experiment_sha256"] != shipped.digest():
        return None
    if record["weights_sha256"] == expected:
        return Beside(True, f"these are the published weights of {name}, designed for every x86-64 CPU with AVX2")
    other = table.other_torch(record["fingerprint"]["torch"])
    why = "" if other is None else f"they were made with torch {table.torch}, and this is {other}; "
    line = f"NOT the published weights of {name} ({expected[:16]}…): {why}`ddp probe` says what differs here"
    return Beside(False, line)

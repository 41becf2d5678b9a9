"""What a run is computed again from, read from its record: options, numerics and experiment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_core.base.errors import UserError
from ddp_core.base.shown import shown
from ddp_core.config.experiment import Experiment
from ddp_core.numerics.limits import RULES


def portable_cpu(record: Mapping[str, Any]) -> str | None:
    """The CPU of a run with portable numerics, whose fingerprint does not name the CPU; None for any other run."""
    if record["fingerprint"].get("numerics") != "portable":
        return None
    cpu: str | None = (record.get("environment") or {}).get("cpu")
    return cpu


def recorded_numerics(record: Mapping[str, Any]) -> str:
    """The numerics that repeat a run. Raises UserError where this version does not compute by the run's rules."""
    rules = (record.get("fingerprint") or {}).get("numerics_rules")
    if rules is None:
        return "native"
    if rules != RULES:
        does = "no longer computes" if isinstance(rules, int) and rules < RULES else "does not know"
        raise UserError(
            f"the run has portable numerics version {shown(str(rules))}, which this version {does}: its weights can be "
            f"loaded, and training it anew gives those of version {RULES}"
        )
    return "portable"


def require_source(path: Path, record: Mapping[str, Any]) -> None:
    """Raises UserError for a run at `path` that has not kept its code."""
    if "source" not in record:
        raise UserError(f"{path} was recorded by an earlier version of ddp, which did not keep the code: train it anew")


def as_recorded(path: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `ddp train` by which the run at `path` is computed again. Raises UserError where it cannot be."""
    require_source(path, record)
    options, source = record["options"], record["source"]
    return {
        "experiment": str(path / source["folder"] / source["experiment"]),
        "record": str(path / "run.json"),
        "reduction": options["reduction"],
        "numerics": recorded_numerics(record),
        # Runs were always deterministic before there was a choice.
        "deterministic": "always" if options.get("deterministic", True) else "never",
        "data_dir": options["data_dir"],
    }


def recorded_experiment(record: Mapping[str, Any]) -> Experiment:
    """The experiment of a run. Raises UserError, which names each wrong field.

    Earlier versions could name a version of portable numerics in it; the fingerprint says which one the run has.
    """
    experiment = record["experiment"]
    if str(experiment.get("numerics")).startswith("portable-"):
        experiment = {**experiment, "numerics": "portable"}
    return Experiment.from_json(experiment)

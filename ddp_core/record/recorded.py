"""What a record says of its run: from what it is computed again, what is not promised, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_core.base.errors import UserError
from ddp_core.base.shown import shown
from ddp_core.config.experiment import Experiment
from ddp_core.config.options import Options
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
    """The experiment of a run. Raises UserError, which names each wrong field."""
    # Earlier versions could name a version of portable numerics in it; the fingerprint says which one the run has.
    experiment = record["experiment"]
    if str(experiment.get("numerics")).startswith("portable-"):
        experiment = {**experiment, "numerics": "portable"}
    return Experiment.from_json(experiment)


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

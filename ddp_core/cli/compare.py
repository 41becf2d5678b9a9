"""Runs side by side: speed, quality, memory and digests, from their records alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.fingerprint import fingerprint_differences
from ddp_core.base.shown import shown
from ddp_core.cli.seeds_table import facts_over_seeds, table_over_seeds
from ddp_core.record.data import how_compared
from ddp_core.record.directory import RunDirectory, find_runs, pass_over
from ddp_core.record.early import how_it_ended
from ddp_core.record.environment import portable_cpu
from ddp_core.record.guarded import broken_promise, what_broke_it
from ddp_core.record.over_seeds import family_of, over_seeds
from ddp_core.record.own_figures import MOST, PREFIX, in_words, own_figures

RunAndRecord = tuple[RunDirectory, Mapping[str, Any]]


def compare_runs(places: Sequence[Path], as_json: bool = False) -> int:
    """Print one table per experiment, or all of them as JSON.

    Raises UserError where there is no run, or where one of `places` is a run directory without a readable record.
    """

    def on_bad(directory: RunDirectory, problem: str) -> None:
        if directory.path in places:
            raise UserError(problem)
        pass_over(directory, problem)

    runs = [run for place in places for run in find_runs(place, on_bad)]
    if not runs:
        raise UserError(f"no runs in {', '.join(map(str, places))}; train one with `ddp train digits`")
    digests = dict.fromkeys(record["experiment_sha256"] for _, record in runs)
    families: dict[str, list[Mapping[str, Any]]] = {}
    for _, record in runs:
        families.setdefault(family_of(record), []).append(record)
    groups = [[run for run in runs if run[1]["experiment_sha256"] == digest] for digest in digests]
    if as_json:
        seeds = {name: facts_over_seeds(over_seeds(records)) for name, records in families.items()}
        print(json.dumps([facts(group) | {"over_seeds": seeds[family_of(group[0][1])]} for group in groups], indent=1))
    else:
        seeds_of = [(over_seeds(records), records[0]["experiment"]["name"]) for records in families.values()]
        last = [text for found, name in seeds_of if (text := table_over_seeds(found, name)) is not None]
        print("\n".join([*(table(group) for group in groups), *last]))
    return ExitCode.DONE


def facts(runs: Sequence[RunAndRecord]) -> dict[str, Any]:
    """What the table of these runs shows, in plain JSON types and SI units; None where a record does not say."""
    records = [record for _, record in runs]
    exact = _comparable(records)
    return {
        "experiment": records[0]["experiment"]["name"],
        "experiment_sha256": records[0]["experiment_sha256"],
        "identical": len({record["weights_sha256"] for record in exact}) == 1 if len(exact) > 1 else None,
        "verdict": verdict(records),
        "runs": [_facts_of(directory, record, _reference(runs)) for directory, record in runs],
    }


def table(runs: Sequence[RunAndRecord]) -> str:
    """The table of runs of one experiment, with the verdict on their digests below it.

    Accuracy and the experiment's own figures, the first of them, have a column where a run has them. Where a run is
    sharded, which is done for the sake of memory, a column shows how much of it the steps took; where of the data of a
    run a sample was digested, or they are random, a column says so.
    """
    name = runs[0][1]["experiment"]["name"]
    sharded = any(record["layout"].get("shard", "none") != "none" for _, record in runs)
    in_part = any(how_compared(record) in ("sample", "random") for _, record in runs)
    own = own_figures(record.get("result") or {} for _, record in runs)[:MOST]
    cells = [_row(_facts_of(directory, record, _reference(runs)), own, sharded, in_part) for directory, record in runs]
    broken = [
        f"! {shown(directory.path.name)}: {what}" for directory, record in runs if (what := what_broke_it(record))
    ]
    early = [f"{shown(directory.path.name)}: {words}" for directory, record in runs if (words := _early(record))]
    return "\n".join([name, *aligned(cells), *broken, *early, verdict([record for _, record in runs]), ""])


def aligned(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """The lines of a table: the names of the columns, a rule, and the rows, all of which have the same columns."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(len(shown(cell)) for cell in column) for column in zip(*lines, strict=True)]
    header, *below = (
        "  ".join(shown(cell).ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
    return [header, "  ".join("-" * width for width in widths), *below]


def verdict(records: Iterable[Mapping[str, Any]]) -> str:
    """Whether the completed exact runs ended with the same weights; if not, the likely cause.

    A run whose promise is broken is not among them, and is named after the verdict.
    """
    records = list(records)
    broken = [words for record in records if (words := broken_promise(record))]
    left_out = f"; left out: {', '.join(broken)}" if broken else ""
    return f"digests: {_verdict(_comparable(records))}{left_out}"


def _verdict(exact: Sequence[Mapping[str, Any]]) -> str:
    if len(exact) < 2:
        return "fewer than two completed exact runs to compare"
    digests = {record["weights_sha256"] for record in exact}
    if len(digests) == 1:
        return f"{len(exact)} exact runs, identical ({digests.pop()[:16]}…){_on_unlike_cpus(exact)}"
    first, other = exact[0], next(r for r in exact if r["weights_sha256"] != exact[0]["weights_sha256"])
    changed = [what for what, digest in _origin(first).items() if digest != _origin(other)[what]]
    if changed:
        return f"{len(digests)} different ones, of other {' and other '.join(changed)}"
    if _early(first) != _early(other):
        ends = (_early(each) or "trained to its last step" for each in (first, other))
        return f"{len(digests)} different ones, of other lengths ({'; '.join(ends)})"
    if "random" in map(how_compared, (first, other)):
        return f"{len(digests)} different ones, of data that differ from one read to the next"
    parts = fingerprint_differences(first["fingerprint"], other["fingerprint"])
    if parts:
        return f"{len(digests)} different ones, under other fingerprints ({parts[0]}): the promise does not cover that"
    by_sample = " (their data were compared by a sample)" if "sample" in map(how_compared, (first, other)) else ""
    return f"{len(digests)} different ones under one fingerprint{by_sample}: `ddp verify RUN` says where they part"


def _early(record: Mapping[str, Any]) -> str | None:
    return how_it_ended(record.get("ended_early"))


def _origin(record: Mapping[str, Any]) -> dict[str, Any]:
    """The digests of what decides the weights, beside the settings."""
    return {
        "code": (record.get("source") or {}).get("files"),
        "data": record.get("data_sha256"),
        "parents": (record.get("forked_from") or {}).get("weights_sha256"),
        "initial weights": (record.get("init_from") or {}).get("sha256"),
    }


def _on_unlike_cpus(records: Iterable[Mapping[str, Any]]) -> str:
    """The end of a verdict that names the CPUs of runs with portable numerics, if these are of several kinds."""
    kinds = {cpu for record in records if (cpu := portable_cpu(record))}
    return f", portable on {len(kinds)} kinds of CPU: {', '.join(sorted(kinds))}" if len(kinds) > 1 else ""


def _comparable(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The completed runs with the exact reduction and a whole promise: all must have ended with the same weights."""
    done = [record for record in records if record["status"] == "completed"]
    return [record for record in done if record["options"]["reduction"] == "exact" and not broken_promise(record)]


def _reference(runs: Sequence[RunAndRecord]) -> float | None:
    """The samples per second of the newest run in a single process, with which the other runs are compared."""
    single = [record for _, record in runs if record["layout"]["kind"] == "single"]
    return next((speed for record in reversed(single) if (speed := _speed(record))), None)


def _facts_of(directory: RunDirectory, record: Mapping[str, Any], reference: float | None) -> dict[str, Any]:
    result, speed, layout = record.get("result") or {}, _speed(record), record["layout"]
    return {
        "run": str(directory.path),
        "layout": layout["label"],
        "simulated": layout["kind"] == "dp" and layout["device"] == "cpu",
        "world_size": layout["nnodes"] * layout["nproc_per_node"],
        "reduction": record["options"]["reduction"],
        "ended_early": record.get("ended_early"),
        "status": record["status"] if record["status"] != "running" or directory.is_live else "interrupted",
        "samples_per_second": speed,
        "speed_up": speed / reference if speed and reference else None,
        "accuracy": result.get("test_accuracy"),
        "figures": {name: value for name, value in result.items() if name.startswith(PREFIX)},
        "loss": result.get("test_loss", result.get("train_loss")),
        "peak_memory_bytes": result.get("peak_memory_bytes"),
        "step_memory_bytes": result.get("step_memory_bytes"),
        "predicted_memory_bytes": result.get("predicted_memory_bytes"),
        "data_wait": result.get("data_wait"),
        "data": how_compared(record),
        "weights_sha256": record.get("weights_sha256"),
        "promise_broken": record.get("promise_broken"),
        "guard": (record.get("attempts") or [{}])[-1].get("guard"),
    }


def _row(facts: dict[str, Any], own: Sequence[str], sharded: bool, in_part: bool) -> dict[str, str]:
    """The cells of a run by the names of their columns."""
    predicted = facts["predicted_memory_bytes"]
    # The memory of the steps alone, without evaluations and saves.
    in_steps = _number(facts["step_memory_bytes"], "{:.0f} MB", 1e-6) + _number(
        predicted, " (predicted {:.0f})", 1e-6, ""
    )
    return {
        "layout": facts["layout"] + (" (threads)" if facts["simulated"] else ""),
        "world": str(facts["world_size"]),
        "reduction": facts["reduction"],
        "samples/s": _number(facts["samples_per_second"] or None, "{:.0f}"),
        "speed-up": _number(facts["speed_up"], "{:.2f}x"),
        **{in_words(name): _own(facts["figures"].get(name)) for name in own},
        "loss": _number(facts["loss"], "{:.5f}"),
        "memory": _number(facts["peak_memory_bytes"], "{:.0f} MB", 1e-6),
        **({"in steps": in_steps} if sharded else {}),
        "data wait": _number(facts["data_wait"], "{:.1f}%", 100),
        **({"data": facts["data"] or "-"} if in_part else {}),
        "weights": (facts["weights_sha256"] or facts["status"])[:12] + (" !" if facts["promise_broken"] else ""),
        "run": Path(facts["run"]).name,
    }


def _speed(record: Mapping[str, Any]) -> float | None:
    if record["status"] != "completed":
        return None
    speed = (record.get("result") or {}).get("samples_per_second")
    return None if speed is None else float(speed)


def _own(value: float | None) -> str:
    return str(value) if isinstance(value, int) else _number(value, "{:.4f}")


def _number(value: float | None, form: str, scale: float = 1.0, without: str = "-") -> str:
    return without if value is None else form.format(value * scale)

"""Runs side by side: speed, quality, memory and digests, from their records alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from ddp_core.base.errors import DIFFERENT, ExitCode, UserError
from ddp_core.base.fingerprint import fingerprint_differences
from ddp_core.base.shown import shown
from ddp_core.config.records import dotted
from ddp_core.distributed.reports import tell_user
from ddp_core.record.data import how_compared
from ddp_core.record.directory import RunDirectory, find_runs, pass_over
from ddp_core.record.figures import MOST, PREFIX, family_of, in_words, origin_of, over_seeds, own_figures
from ddp_core.record.recorded import broken_promise, how_it_ended, portable_cpu, was_rehearsed, what_broke_it

RunAndRecord = tuple[RunDirectory, Mapping[str, Any]]


def compare_runs(places: Sequence[Path], as_json: bool = False, checks: bool = True) -> int:
    """Print one table per experiment, or all of them as JSON; returns the exit code.

    That is 1 where exact runs have other weights than the promise gives them, unless it is not to be asked (`checks`).
    """

    def on_bad(directory: RunDirectory, problem: str) -> None:
        if directory.path in places:
            raise UserError(problem)
        pass_over(directory, problem)

    found = [list(find_runs(place, on_bad)) for place in places]
    if empty := [str(place) for place, some in zip(places, found, strict=True) if not some]:
        raise UserError(f"no runs in {', '.join(empty)}; train one with `ddp train digits`")
    # A run that lies below several of the places is still one run.
    runs = list({run[0].path.absolute(): run for some in found for run in some}.values())
    refused = [run for run in runs if run[0].path not in places and _is_refused(*run)]
    if 0 < len(refused) < len(runs):
        runs = [run for run in runs if run not in refused]
        tell_user(f"left out: {len(refused)} that ended as bad input before the first step; name one to see it")
    digests = dict.fromkeys(record["experiment_sha256"] for _, record in runs)
    families: dict[str, list[Mapping[str, Any]]] = {}
    for _, record in runs:
        families.setdefault(family_of(record), []).append(record)
    groups = [[run for run in runs if run[1]["experiment_sha256"] == digest] for digest in digests]
    over = {name: over_seeds(records) for name, records in families.items()}
    if as_json:
        seeds = {name: found and found.facts for name, found in over.items()}
        print(json.dumps([facts(group) | {"over_seeds": seeds[family_of(group[0][1])]} for group in groups], indent=1))
    else:
        last = [found.table(families[name][0]["experiment"]["name"]) for name, found in over.items() if found]
        titles = titles_of([[record for _, record in group] for group in groups])
        print("\n".join([*(table(*pair) for pair in zip(groups, titles, strict=True)), *last]))
    broken = any(_unlike_the_promise(_comparable(record for _, record in group)) for group in groups)
    return DIFFERENT if checks and broken else ExitCode.DONE


def _is_refused(directory: RunDirectory, record: Mapping[str, Any]) -> bool:
    """Whether the run ended as bad input before its first step."""
    is_bad = record["status"] == "failed" and record["exit_code"] == ExitCode.BAD_INPUT
    return is_bad and not (directory.metrics.exists() and directory.metrics.stat().st_size)


def titles_of(groups: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """A title for the runs of each experiment: its name, and what sets it apart from the main one of that name."""
    main: dict[str, Sequence[Mapping[str, Any]]] = {}
    for group in sorted(groups, key=len, reverse=True):
        main.setdefault(group[0]["experiment"]["name"], group)
    titles = []
    for group in groups:
        experiment = group[0]["experiment"]
        apart = set_apart(experiment, main[experiment["name"]][0]["experiment"])
        titles.append(f"{experiment['name']}, {apart}" if apart else experiment["name"])
    return titles


def set_apart(own: Mapping[str, Any], main: Mapping[str, Any]) -> str:
    """The first settings, with their values, in which an experiment is not like the `main` one of its name."""
    here, there = dotted(own), dotted(main)
    varied = [name for name in here if name != "name" and there.get(name, ...) != here[name]]
    return ", ".join(f"{name}={json.dumps(here[name])}" for name in varied[:3]) + (" …" if len(varied) > 3 else "")


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


def table(runs: Sequence[RunAndRecord], title: str) -> str:
    """The table of runs of one experiment, with the verdict on their digests below it."""
    # Columns that tell a reader nothing where all runs are alike are there only where one run has something to say.
    sharded = any(record["layout"].get("shard", "none") != "none" for _, record in runs)
    in_part = any(how_compared(record) in ("sample", "random") for _, record in runs)
    own = own_figures(record.get("result") or {} for _, record in runs)[:MOST]
    each = [_facts_of(directory, record, _reference(runs)) for directory, record in runs]
    unfinished = any(facts["status"] != "completed" for facts in each)
    cells = [_row(facts, own, sharded, in_part, unfinished) for facts in each]
    broken = [
        f"! {shown(directory.path.name)}: {what}" for directory, record in runs if (what := what_broke_it(record))
    ]
    early = [f"{shown(directory.path.name)}: {words}" for directory, record in runs if (words := how_it_ended(record))]
    records = [record for _, record in runs]
    exact = _comparable(records)
    tried = sum(map(was_rehearsed, exact))
    untried = [f"not rehearsed: {len(exact) - tried} of {len(exact)} exact runs"] if tried < len(exact) else []
    return "\n".join([shown(title), *aligned(cells), *broken, *early, verdict(records), *untried, ""])


def aligned(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """The lines of a table: the names of the columns, a rule, and the rows, all of which have the same columns."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(len(shown(cell)) for cell in column) for column in zip(*lines, strict=True)]
    header, *below = (
        "  ".join(shown(cell).ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
    return [header, "  ".join("-" * width for width in widths), *below]


def verdict(records: Iterable[Mapping[str, Any]]) -> str:
    """Whether the completed exact runs ended with the same weights; if not, the likely cause; and who is left out."""
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
    if (pair := _unlike_the_promise(exact)) is None:
        first, other = exact[0], next(r for r in exact if r["weights_sha256"] != exact[0]["weights_sha256"])
        return f"{len(digests)} different ones, {_reason(first, other)}"
    by_sample = " (their data were compared by a sample)" if "sample" in map(how_compared, pair) else ""
    return f"{len(digests)} different ones under one fingerprint{by_sample}: `ddp verify RUN` says where they part"


def _unlike_the_promise(exact: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """The first two runs of one experiment whose weights differ for no reason that is known: against the promise."""
    for first, other in combinations(exact, 2):
        if first["weights_sha256"] != other["weights_sha256"] and _reason(first, other) is None:
            return first, other
    return None


def _reason(first: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Why two exact runs of one experiment may end with other weights; None where nothing explains it."""
    changed = [what for what, digest in origin_of(first).items() if digest != origin_of(other)[what]]
    if changed:
        return f"of other {' and other '.join(changed)}"
    if how_it_ended(first) != how_it_ended(other):
        ends = (how_it_ended(each) or "trained to its last step" for each in (first, other))
        return f"of other lengths ({'; '.join(ends)})"
    if "random" in map(how_compared, (first, other)):
        return "of data that differ from one read to the next"
    if parts := fingerprint_differences(first["fingerprint"], other["fingerprint"]):
        return f"under other fingerprints ({parts[0]}): the promise does not cover that"
    return None


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
        "status": record["status"] if record["status"] != "running" or directory.is_worked_in else "interrupted",
        "samples_per_second": speed,
        "speed_up": speed / reference if speed and reference else None,
        "accuracy": result.get("test_accuracy"),
        "figures": {name: value for name, value in result.items() if name.startswith(PREFIX)},
        "loss": result.get("test_loss", result.get("train_loss")),
        "peak_memory_bytes": result.get("peak_memory_bytes"),
        "step_memory_bytes": result.get("step_memory_bytes"),
        "data_wait": result.get("data_wait"),
        "data": how_compared(record),
        "weights_sha256": record.get("weights_sha256"),
        "promise_broken": record.get("promise_broken"),
        "guard": (record.get("attempts") or [{}])[-1].get("guard"),
    }


def _row(facts: dict[str, Any], own: Sequence[str], sharded: bool, in_part: bool, unfinished: bool) -> dict[str, str]:
    """The cells of a run by the names of their columns."""
    # The memory of the steps alone, without evaluations and saves.
    in_steps = _number(facts["step_memory_bytes"], "{:.0f} MB", 1e-6)
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
        **({"status": facts["status"]} if unfinished else {}),
        "weights": (facts["weights_sha256"] or "-")[:12] + (" !" if facts["promise_broken"] else ""),
        "run": Path(facts["run"]).name,
    }


def _speed(record: Mapping[str, Any]) -> float | None:
    if record["status"] != "completed":
        return None
    speed = (record.get("result") or {}).get("samples_per_second")
    return None if speed is None else float(speed)


def _own(value: float | None) -> str:
    return str(value) if isinstance(value, int) else _number(value, "{:.4f}")


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else form.format(value * scale)

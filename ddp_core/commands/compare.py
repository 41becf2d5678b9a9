"""Runs side by side: speed, quality, memory and digests, from their records alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ddp_core.determinism.fingerprint import differences
from ddp_core.errors import ExitCode, UserError
from ddp_core.run.directory import RunDirectory, find_runs

Run = tuple[RunDirectory, dict[str, Any]]


def compare(places: Sequence[Path]) -> int:
    """Print one table per experiment. Raises UserError where there is no run."""
    runs = [run for place in places for run in find_runs(place)]
    if not runs:
        raise UserError(f"no runs in {', '.join(map(str, places))}; train one with `ddp train digits`")
    for digest in dict.fromkeys(record["experiment_sha256"] for _, record in runs):
        same = [run for run in runs if run[1]["experiment_sha256"] == digest]
        print(table(same))
    return ExitCode.DONE


def table(runs: Sequence[Run]) -> str:
    """The table of runs of one experiment, with the verdict on their digests below it."""
    name = runs[0][1]["experiment"]["name"]
    reference = next(
        (_speed(record) for _, record in reversed(runs) if _kind(record) == "single" and _speed(record)), None
    )
    header = (
        "layout",
        "world",
        "reduction",
        "samples/s",
        "speed-up",
        "accuracy",
        "loss",
        "memory",
        "data wait",
        "weights",
        "run",
    )
    rows = [_row(directory, record, reference) for directory, record in runs]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [f"{name}"]
    lines += [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    ]
    lines.insert(2, "  ".join("-" * width for width in widths))
    return "\n".join([*lines, verdict([record for _, record in runs]), ""])


def verdict(records: Iterable[dict[str, Any]]) -> str:
    """Whether the completed exact runs ended with the same weights, and if not, why that may be."""
    done = [record for record in records if record["status"] == "completed"]
    exact = [record for record in done if record["options"]["reduction"] == "exact"]
    if len(exact) < 2:
        return "digests: fewer than two completed exact runs to compare"
    digests = {record["weights_sha256"] for record in exact}
    if len(digests) == 1:
        return f"digests: {len(exact)} exact runs, identical ({digests.pop()[:16]}…)"
    parts = differences(
        exact[0]["fingerprint"],
        next(r for r in exact if r["weights_sha256"] != exact[0]["weights_sha256"])["fingerprint"],
    )
    if parts:
        return (
            f"digests: {len(digests)} different ones, under other fingerprints ({parts[0]}): "
            "the promise does not cover that"
        )
    return f"digests: {len(digests)} different ones under one fingerprint: `ddp verify RUN` says where they part"


def _row(directory: RunDirectory, record: dict[str, Any], reference: float | None) -> tuple[str, ...]:
    result, speed, layout = record.get("result") or {}, _speed(record), record["layout"]
    status = record["status"] if record["status"] != "running" or directory.is_live else "interrupted"
    simulated = layout["kind"] == "dp" and layout["device"] == "cpu"
    return (
        layout["label"] + (" (threads)" if simulated else ""),
        str(layout["nnodes"] * layout["nproc_per_node"]),
        record["options"]["reduction"],
        f"{speed:.0f}" if speed else "-",
        f"{speed / reference:.2f}x" if speed and reference else "-",
        _number(result.get("test_accuracy"), "{:.4f}"),
        _number(result.get("test_loss", result.get("train_loss")), "{:.5f}"),
        _number(result.get("peak_memory_bytes"), "{:.0f} MB", 1e-6),
        _number(result.get("data_wait"), "{:.1f}%", 100),
        (record.get("weights_sha256") or status)[:12],
        directory.path.name,
    )


def _kind(record: dict[str, Any]) -> str:
    return str(record["layout"]["kind"])


def _speed(record: dict[str, Any]) -> float | None:
    if record["status"] != "completed":
        return None
    speed = (record.get("result") or {}).get("samples_per_second")
    return None if speed is None else float(speed)


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else form.format(value * scale)

"""Weak and strong scaling of whole runs: `ddp train digits` on single, dp and ddp.

Strong scaling cuts the same global batch finer, weak scaling keeps the batch of each worker. With exact reduction all
layouts of one global batch end with the same weights, however fast they were; the digests show it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.measuring.training import train
from ddp_lab.records import Axis, Figure, Line, Series

Row = dict[str, Any]


def measure_scaling(
    setting: Setting, claim: str, counts: Sequence[int], epochs: int, global_batch_size: int
) -> list[Row]:
    """One row per mode, layout and count: samples per second, cores kept busy by a worker, weights digest."""
    rows: list[Row] = []
    if not counts:
        return rows
    for mode, count in [("strong", 1), *((mode, count) for mode in ("strong", "weak") for count in counts)]:
        batch = global_batch_size * (count if mode == "weak" else 1)
        layouts = ["single"] if count == 1 else ["dp", "ddp"]
        if mode == "weak":
            layouts.insert(0, "single")  # the digest that the others must have
        for layout in layouts:
            workers = 1 if layout == "single" else count
            settings = [f"epochs={epochs}", f"global_batch_size={batch}"]
            setting.say(f"digits, {mode} scaling, {layout} x {workers}")
            run = train(setting, claim, "digits", layout, workers, settings, ["--reduction", "exact"])
            row: Row = {"mode": mode, "layout": layout, "count": workers, "global_batch_size": batch}
            names = ("samples_per_second", "cpu_utilisation", "gpu_utilisation")
            row |= {name: run.record["result"][name] for name in names}
            rows.append(row | {"weights_sha256": run.record["weights_sha256"]})
    return rows


def shown(rows: list[Row]) -> tuple[list[Figure], list[Series]]:
    """The rows as figures and plots; speed-ups are over the single process with the smallest global batch."""
    single = next((row for row in rows if row["layout"] == "single"), None)
    if single is None:
        return [], []
    figures = [
        Figure(_name(row, row is single), row["samples_per_second"], "samples/s")
        for row in rows
        if row["layout"] != "single" or row is single
    ]
    by_batch: dict[int, set[str]] = {}
    for row in rows:
        by_batch.setdefault(row["global_batch_size"], set()).add(row["weights_sha256"])
    same = all(len(digests) == 1 for digests in by_batch.values())
    figures.append(Figure("digits: one digest per global batch, whatever the layout", same))
    return figures, [_plot(mode, rows, single) for mode in ("strong", "weak")]


def _name(row: Row, alone: bool) -> str:
    what = "single" if alone else f"{row['mode']} scaling, {row['layout']} x {row['count']}"
    busy = f"{row['cpu_utilisation']:.2f} cores busy each"
    if row["gpu_utilisation"] is not None:
        busy += f", GPU {100 * row['gpu_utilisation']:.0f} % of the time"
    return f"digits, {what} ({busy}; weights {row['weights_sha256'][:12]})"


def _plot(mode: str, rows: list[Row], single: Row) -> Series:
    found = {(row["layout"], row["count"]): row["samples_per_second"] for row in rows if row["mode"] == mode}
    more = sorted({row["count"] for row in rows} - {1})
    counts = [1, *more]
    lines = [Line("N times faster", list(map(float, counts)))]
    for layout, name in (("dp", "DP"), ("ddp", "DDP")):
        speeds = [found.get((layout, count)) for count in more]
        base = single["samples_per_second"]
        lines.append(Line(name, [1.0, *(speed / base if speed else None for speed in speeds)]))
    title = f"Speed-up of whole runs, digits, {mode} scaling"
    return Series(title, Axis("processes or replicas", "", list(map(float, counts))), Axis("speed-up", "x"), lines)

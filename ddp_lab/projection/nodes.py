"""The model of an all-reduce between nodes, beside what `python -m benchmarks.nodes` measured on shaped links.

There, nodes are network namespaces on one machine: each node's link has its own rate, but all ranks copy bytes with the
same few cores. Three things take time: bytes that leave a node, at the pace of its link; bytes copied from process to
process, at the pace of the cores; and messages, one after the other. While the link is busy the cores copy. Only the
exact reduction in two levels has phases inside the nodes in which the link has nothing to do.

Seconds per byte and per message are fitted on nodes of two ranks, 2 x 2 and 3 x 2. Nodes of more ranks are held out.
Beside that, the constants fitted to 2 to 4 processes of one machine predict its nodes, of which they have seen none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, get_args

import numpy as np

from ddp_core.base.documents import read_document
from ddp_core.base.errors import UserError
from ddp_lab.projection.costs import Way, traffic
from ddp_lab.projection.fit import TARGET, Fitted

SIZE = 4_000_000
"""Bytes of the tensor that benchmarks.nodes sums."""
FITTED_PER_NODE = 2
COMMAND = "python -m benchmarks.nodes"

# Of 1514 bytes of a full Ethernet frame, 1448 are TCP's payload (with time stamps); the shaped link counts all.
_FRAME = 1514 / 1448


@dataclass(frozen=True)
class Point:
    """Seconds of one way to sum, on nodes whose links carry `rate` bytes per second; None: as fast as cores copy."""

    way: Way
    nodes: int
    per_node: int
    rate: float | None
    seconds: float


@dataclass(frozen=True)
class Constants:
    """Of a machine with so many cores: seconds of a core per byte that it copies, and seconds per message."""

    cores: int
    per_byte: float
    per_message: float

    def seconds(self, point: Point) -> float:
        """The time that the model predicts for the point."""
        fixed, messages = _fixed_and_messages(point, self.per_byte / self.cores)
        return fixed + messages * self.per_message


def read(path: Path) -> tuple[list[Point], int]:
    """The fastest round of each row and way, and the cores of the machine. Raises UserError (2) for other files."""
    try:
        content = read_document(path, dict[str, Any])
        points = [
            Point(
                way,
                row["nodes"],
                row["ranks_per_node"],
                row["mbit_per_second"] and row["mbit_per_second"] * 1e6 / 8,
                min(row["ways"][way]["seconds"]),
            )
            for row in content["results"]
            for way in get_args(Way)
        ]
        return points, int(content["machine"]["cores"])
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; `{COMMAND}` writes such a file") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is not what `{COMMAND}` writes") from None


def split(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """Points to fit on, and points that the fit must not see: nodes of more ranks than two."""
    seen = [point for point in points if point.per_node <= FITTED_PER_NODE]
    return seen, [point for point in points if point not in seen]


def fit(points: Sequence[Point], cores: int) -> Constants:
    """Least squares of the relative error; the best seconds per message for each of many seconds per byte.

    Raises ValueError for no points.
    """
    if not points:
        raise ValueError("no points to fit")
    best: tuple[float, Constants] | None = None
    for per_byte in np.geomspace(1e-11, 1e-7, 401):
        rows = np.array([(*_fixed_and_messages(point, per_byte / cores), point.seconds) for point in points])
        rest, slope = 1 - rows[:, 0] / rows[:, 2], rows[:, 1] / rows[:, 2]
        per_message = max(0.0, float(slope @ rest / (slope @ slope)))
        error = float(np.square(rest - slope * per_message).sum())
        if best is None or error < best[0]:
            best = error, Constants(cores, float(per_byte), per_message)
    assert best is not None
    return best[1]


def check_nodes(path: Path) -> dict[str, Any]:
    """Fit on one part of a file's rows, and predict the other: plain JSON types. Raises UserError (2)."""
    points, cores = read(path)
    seen, held = split(points)
    if not seen or not held:
        raise UserError(f"{path} must have nodes of two ranks to fit, and of more to check: run `{COMMAND}`")
    constants = fit(seen, cores)
    rows = [
        {
            "way": point.way,
            "nodes": point.nodes,
            "per_node": point.per_node,
            "bytes_per_second": point.rate,
            "measured": point.seconds,
            "predicted": constants.seconds(point),
            "error": constants.seconds(point) / point.seconds - 1,
        }
        for point in held
    ]
    errors = [abs(constants.seconds(point) / point.seconds - 1) for point in held]
    return {
        "file": str(path),
        "cores": cores,
        "seconds_per_byte": constants.per_byte,
        "seconds_per_message": constants.per_message,
        "fitted_points": len(seen),
        "held_out": rows,
        "median_error": median(errors),
        "largest_error": max(errors),
        "passed": median(errors) <= TARGET,
    }


def carried_over(path: Path, here: Fitted, cpu: str) -> dict[str, Any] | None:
    """What the fit of all-reduce on one machine says of that machine's nodes: plain JSON types.

    A sum takes as long as its ranks need for it on one machine, or as a node's link needs for the bytes that leave the
    node, whichever is longer. None where the file is of another machine, by its cores and CPU. Raises UserError (2).
    """
    points, cores = read(path)
    if (cores, read_document(path, dict[str, Any])["machine"].get("cpu")) != (here.cores, cpu):
        return None
    rows: list[dict[str, Any]] = []
    for point in points:
        if point.way != "all_reduce":
            continue
        predicted = max(here.seconds(point.nodes * point.per_node, SIZE), _link_seconds(point))
        rows.append(
            {
                "nodes": point.nodes,
                "per_node": point.per_node,
                "bytes_per_second": point.rate,
                "measured": point.seconds,
                "predicted": predicted,
                "error": predicted / point.seconds - 1,
            }
        )
    errors = [abs(row["error"]) for row in rows]
    return {"file": str(path), "rows": rows, "median_error": median(errors), "largest_error": max(errors)}


def carried_lines(found: dict[str, Any] | None) -> list[str]:
    """That prediction as a table; one line where there is none."""
    if found is None:
        return ["", "nodes were measured on another machine, so the constants fitted here say nothing of them"]
    cells: dict[tuple[int, int], list[str]] = {}
    for row in found["rows"]:
        cell = f"{_named(row['bytes_per_second'])}: {1e3 * row['predicted']:.0f} for {1e3 * row['measured']:.0f}"
        cells.setdefault((row["nodes"], row["per_node"]), []).append(f"{cell} ({100 * row['error']:+.0f} %)")
    return [
        "",
        "nodes predicted from 2 to 4 processes of one machine and the links' rates, nothing fitted on nodes:",
        "all_reduce of 4 MB, predicted ms for measured ms",
        *(f"{nodes}x{per_node}   " + "   ".join(row) for (nodes, per_node), row in cells.items()),
        f"error {100 * found['median_error']:.0f} % in the median, {100 * found['largest_error']:.0f} % at most",
    ]


def node_lines(found: dict[str, Any]) -> list[str]:
    """The check as a table: a line for each shape and link, with predicted and measured ms of each way."""
    table: dict[tuple[str, str], list[str]] = {}
    for row in found["held_out"]:
        link = _named(row["bytes_per_second"])
        cell = f"{1e3 * row['predicted']:9.0f}{1e3 * row['measured']:9.0f}{100 * row['error']:+5.0f}%"
        table.setdefault((f"{row['nodes']}x{row['per_node']}", link), []).append(cell)
    verdict = "" if found["passed"] else f"; over the target of {100 * TARGET:.0f} %"
    return [
        "",
        f"between nodes, from {found['file']}; rule: fitted on 2x2 and 3x2 alone, more ranks per node are held out",
        f"{1e9 * found['seconds_per_byte']:.2f} ns/byte of a core, {1e3 * found['seconds_per_message']:.2f} ms/message",
        f"{'held out':20}" + "".join(f"{way + ', ms':>24}" for way in get_args(Way)),
        f"{'nodes x ranks   link':20}" + f"{'model':>9}{'measured':>9}{'off':>6}" * len(get_args(Way)),
        *(f"{shape:8}{link:>12}{''.join(cells)}" for (shape, link), cells in table.items()),
        f"error on {len(found['held_out'])} held-out points: {100 * found['median_error']:.1f} % in the median, "
        f"{100 * found['largest_error']:.0f} % at most{verdict}",
    ]


def _fixed_and_messages(point: Point, per_byte: float) -> tuple[float, int]:
    """Seconds apart from messages, and the number of messages; `per_byte` is that of all cores together."""
    sent = traffic(point.way, point.nodes, point.per_node)
    link = _link_seconds(point)
    # The ranks of all nodes share the cores.
    across, inside = (per_byte * point.nodes * part * SIZE for part in (sent.across, sent.inside))
    messages = sent.messages_inside + sent.messages_across
    if point.way == "two levels":
        return inside + max(link, across), messages
    return max(link, inside + across), messages


def _link_seconds(point: Point) -> float:
    """Seconds that a node's link needs for the bytes that leave the node."""
    sent = traffic(point.way, point.nodes, point.per_node)
    return _FRAME * sent.across * SIZE / point.rate if point.rate else 0.0


def _named(rate: float | None) -> str:
    return f"{8e-6 * rate:.0f} Mbit/s" if rate else "unshaped"

"""What the projection prints: steps on more GPUs, where each constant comes from, and what others measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp_lab.projection.costs import Cluster
from ddp_lab.projection.forecast import forecast_errors
from ddp_lab.projection.hardware import Gpu

_HELD_OUT = "held out: found after the rule of the forecast was settled, nothing fitted to them"


def projection_lines(content: dict[str, Any], gpu: Gpu, cluster: Cluster) -> list[str]:
    """Each number of GPUs in a line; where a publication has that GPU and that number, the line says its figure."""
    _, checked = forecast_errors()
    lines = [
        "",
        f"projected: {gpu.name}, {gpu.batch} samples per GPU and step, {gpu.gradient_bytes / 1e6:.0f} MB of gradients,",
        f"{cluster.per_node} GPUs per node on {cluster.inside.bandwidth / 1e9:.0f} GB/s, "
        f"{cluster.between.bandwidth / 1e9:.3g} GB/s between nodes (weak scaling)",
        "`at most`: a bound by NCCL's estimates, of communication and `slowest` alone; "
        "`forecast`: less what a published run on one node loses beside that bound",
        f"{'GPUs':>6}{'slowest: ms':>12}{'NCCL picks':>13}{'ms':>8}{'exposed':>9}{'at most':>9}{'forecast':>10}"
        f"{'exact: ms':>11}{'exposed':>9}{'modelled':>10}{'ring alone':>12}{'tree alone':>12}  published",
    ]
    for row in content["projection"]:
        nccl, exact = row["nccl"], row["exact"]
        forecast = "-" if row["forecast"] is None else _percent(row["forecast"]) + "?" * (row["ranks"] > checked)
        published = "" if row["published"] is None else _beside(nccl["efficiency"], row["published"])
        lines.append(
            f"{row['ranks']:6}{1e3 * nccl['slowest']:12.2f}{row['nccl_picks']:>13}{1e3 * nccl['seconds']:8.1f}"
            f"{1e3 * nccl['exposed']:9.2f}{_percent(nccl['efficiency']):>9}{forecast:>10}"
            f"{1e3 * exact['seconds']:11.1f}{1e3 * exact['exposed']:9.2f}{_percent(exact['efficiency']):>10}"
            f"{_percent(row['ring']['efficiency']):>12}{_percent(row['tree']['efficiency']):>12}  {published}".rstrip()
        )
    return [*lines, content["forecast_from"]]


def origin_lines(origins: dict[str, Any]) -> list[str]:
    """Which constants were fitted here, and which are published or given and were never checked here."""
    here = origins["fitted here"]
    lines = ["", "constants"]
    lines += [f"  fitted here: {one}" for one in here] or ["  fitted here: none (--skip-measuring)"]
    lines.append("    they predict this machine (the held-out tables); no figure of the projected table uses them")
    lines += [f"  published, never checked here: {one}" for one in origins["published, never checked here"]]
    lines += [f"  given: {one}" for one in origins["given"]]
    return lines


def published_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each published run: its efficiency, the model's bound, and the forecast from a run on one node."""
    lines = [
        "",
        "published: efficiency, the model's bound, and the forecast from the same publication's run on one node",
        f"{'':26}{'GPUs':>10}{'published':>11}{'at most':>9}{'model is':>10}{'forecast':>10}{'off':>8}",
    ]
    for row in rows:
        if row["held_out"] and _HELD_OUT not in lines:
            lines.append(_HELD_OUT)
        forecast = f"{'-':>10}" if row["forecast"] is None else f"{_percent(row['forecast']):>10}"
        off = "" if row["forecast"] is None else f"{100 * row['forecast_error']:+.1f} %"
        lines.append(
            f"{row['what']:26}{row['base']:>4} to {row['ranks']:<3}{_percent(row['published']):>10}"
            f"{_percent(row['modelled']):>9}{100 * row['error']:+8.1f} %{forecast}{off:>8}".rstrip()
        )
    lines += dict.fromkeys(f"  {row['source']}" for row in rows)
    return [*lines, *dict.fromkeys(f"  assumed of {row['what']}: {row['assumed']}" for row in rows if row["assumed"])]


def markdown_row(row: dict[str, Any]) -> str:
    """The line for a published run in the tables of docs/explanation/scaling-out.md."""
    forecast, off = "-", "-"
    if row["forecast"] is not None:
        forecast, off = _percent(row["forecast"]), f"{100 * row['forecast_error']:+.1f} %"
    cells = (
        *(f"{row['what']}, {row['ranks']} GPUs", _percent(row["published"]), _percent(row["modelled"])),
        *(f"{100 * row['error']:+.1f} %", forecast, off),
    )
    return f"| {' | '.join(cells)} |"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _beside(modelled: float, published: dict[str, Any]) -> str:
    """A published efficiency, with how far the bound is above it."""
    error = modelled / published["efficiency"] - 1
    return f"{_percent(published['efficiency'])} ({published['what']}: the bound is {100 * error:+.1f} %)"

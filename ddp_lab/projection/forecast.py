"""What the model predicts for the hardware of published runs, and what it misses of them.

The model knows of communication alone. What else a real run loses (an input pipeline that the GPUs of a node share,
stragglers, the part of a GPU that NCCL takes) is all in the gap between it and a published run. That gap, taken from a
run on one node, is carried over to more nodes; runs on several nodes then say how far such a forecast is off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ddp_lab.projection.costs import Cluster
from ddp_lab.projection.hardware import Gpu
from ddp_lab.projection.nccl import choose
from ddp_lab.projection.published import HELD_OUT, KNOWN, Published
from ddp_lab.projection.step import step


def compare(results: Sequence[Published] = (*KNOWN, *HELD_OUT)) -> list[dict[str, Any]]:
    """Each published efficiency, the model's, and the forecast from the same publication's run on one node, if any."""
    rows = []
    for result in results:
        bound = _bound(result)
        node = next((other for other in results if _same(other, result) and other.is_one_node), None)
        forecast = bound * gap(node) if node is not None and result.ranks > node.ranks else None
        rows.append(
            asdict(result)
            | {
                "held_out": result in HELD_OUT,
                "published": result.efficiency,
                "modelled": bound,
                "error": bound / result.efficiency - 1,
                "forecast": forecast,
                "forecast_error": None if forecast is None else forecast / result.efficiency - 1,
            }
        )
    return rows


def forecast_errors() -> tuple[list[float], int]:
    """How far forecasts from one node were off on published runs of several, and the most GPUs among these runs."""
    rows = [row for row in compare() if row["forecast_error"] is not None]
    return [row["forecast_error"] for row in rows], max(row["ranks"] for row in rows)


def beside(gpu: Gpu, cluster: Cluster, ranks: int) -> Published | None:
    """A publication with this GPU, as fast alone as here within 1 %, in such nodes, and with this number of GPUs."""
    return next((result for result in _of(gpu, cluster) if result.ranks == ranks), None)


def whole_node(gpu: Gpu, cluster: Cluster) -> Published | None:
    """A publication with this GPU, as fast alone as here within 1 %, with all GPUs of one such node."""
    return next((result for result in _of(gpu, cluster) if result.is_one_node), None)


def gap(result: Published) -> float:
    """What is left of the model's efficiency in the published run: 1 where the model misses nothing."""
    return result.efficiency / _bound(result)


def _of(gpu: Gpu, cluster: Cluster) -> list[Published]:
    return [
        result
        for result in (*KNOWN, *HELD_OUT)
        # A list of efficiencies alone, without speeds, does not say how fast the GPU was.
        if (result.gpu.name, result.cluster, result.assumed) == (gpu.name, cluster, "")
        and (result.gpu.gradient_bytes, result.gpu.batch) == (gpu.gradient_bytes, gpu.batch)
        and abs(result.gpu.samples_per_second / gpu.samples_per_second - 1) < 0.01
    ]


def _same(one: Published, other: Published) -> bool:
    return (one.what, one.source) == (other.what, other.source)


def _bound(result: Published) -> float:
    return _efficiency(result, result.ranks) / _efficiency(result, result.base)


def _efficiency(result: Published, ranks: int) -> float:
    def all_reduce(size: float) -> float:
        return choose(size, ranks, result.cluster).seconds

    compute = result.gpu.batch / result.gpu.samples_per_second
    return step(compute, result.gpu.gradient_bytes, all_reduce, ranks, result.bucket_bytes).efficiency

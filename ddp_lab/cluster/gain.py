"""Why a cluster on one machine is hardly faster than one process, or slower: read from the records of both runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddp_core.observe.usage import disturbance

_NEAR = 0.8
"""A speed-up of at least this share of the world size needs no explanation."""
_MUCH = 0.2
"""From this share of a step on, waiting for other processes is a reason."""
_SMALL = 0.05
"""Below so many seconds of a step, the time that a message takes counts."""

_LARGE = "resnet18_synthetic"
# Seconds of computation for each exchange of gradients: two processes on two cores gain most of what there is to gain.
GAINS = (
    f"make cpu-cluster NODES=1 NPROC=2 EXPERIMENT={_LARGE} OPTIONS="
    '"--set data.image_size=64 --set data.samples=1280 --set data.pool=128 --set global_batch_size=64 --set epochs=1"'
)


def explain_gain(single: Mapping[str, Any], cluster: Mapping[str, Any]) -> list[str]:
    """Lines that say why, and which command shows a gain here; none where the speed-up is near the world size.

    Both are records (run.json) of completed runs; all processes of the cluster share one machine.
    """
    alone, together = ((record.get("result") or {}).get("samples_per_second") for record in (single, cluster))
    cores = (cluster.get("environment") or {}).get("cores")
    layout = cluster["layout"]
    world = layout["nnodes"] * layout["nproc_per_node"]
    if not alone or not together or not cores:
        return []
    speed_up: float = together / alone
    if speed_up >= _NEAR * world:
        return []
    if cores == 1:
        return [f"{world} processes take turns on one core: what they show is the same weights, not a gain in speed"]
    reasons = [f"{world} processes share {cores} cores"] if world > cores else []
    if disturbed := disturbance(cluster):
        reasons.append(f"{disturbed} meanwhile")
    split = cluster["result"].get("time_split") or {}
    step, waiting = sum(split.values()), split.get("exposed_communication", 0.0)
    if step and waiting / step >= _MUCH:
        times = f"{1e3 * waiting:.1f} of {1e3 * step:.1f} ms"
        small = ": this network is too small to gain" if step < _SMALL else ""
        reasons.append(f"{100 * waiting / step:.0f} % of each step ({times}) waits for other processes{small}")
    why = ", and ".join(reasons) or "each process computes more slowly beside the others than alone"
    line = f"why {speed_up:.2f}x: {why}"
    return [line] if cluster["experiment"]["name"] == _LARGE else [line, f"this gains here, in about a minute: {GAINS}"]

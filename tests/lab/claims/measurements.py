"""Made-up measurements of every claim. Unchanged, they confirm it; exceptions are in UNCHANGED of the rules."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from ddp_lab.claims.framework.statistics import ROUNDS

Measurements = dict[str, Any]
SEEDS = range(ROUNDS[0])


def around(value: float, rounds: int = ROUNDS[0], spread: float = 0.01) -> list[float]:
    """The rounds of a measurement, all near `value`."""
    return [value * (1 + spread * ((number * 5) % rounds / rounds - 0.5)) for number in range(rounds)]


def noise(value: float) -> list[float]:
    """The rounds of a measurement that vary too much to show a difference."""
    return [value * factor for factor in (0.6, 1.5, 0.8, 1.3, 1.0, 0.7, 1.6, 0.9, 1.2, 0.8, 1.1)]


def wave(height: float) -> list[float]:
    """Losses that alternate between `height` and -`height`."""
    return [height * (-1) ** step for step in range(40)]


def spread(height: float, workers: int) -> list[float]:
    """A wave of which each height is that of so many gradients."""
    return [loss for loss in wave(height) for _ in range(workers)]


def c01() -> Measurements:
    run = {"w": 2.001, "b": 2.999, "loss": 0.0101, "seed": 0}
    runs = [run | {"layout": "single x 1"}, run | {"layout": "ddp x 2"}]
    return {"runs": runs, "tolerance": 0.02, "limit_of_loss": 0.0115}


def c02(small: float = 1.1, torchvisions: float = 1.05, apart: float = 1.02, devices: int = 2) -> Measurements:
    """`small` and `torchvisions`: seconds of DDP's step for each stem, where one process takes 1 for half as much."""

    def ways(**seconds: float) -> Measurements:
        samples = {"1": 16} | {way.replace("_", " "): 16 if "strong" in way else 32 for way in seconds}
        times = {"1": 1.0} | {way.replace("_", " "): value for way, value in seconds.items()}
        return {"samples": samples, "seconds": {way: around(value) for way, value in times.items()}}

    points = [
        {"stem": "small", "batch": 8} | ways(weak_2=small, apart_2=apart),
        {"stem": "torchvision's", "batch": 64} | ways(weak_2=torchvisions, apart_2=apart),
    ]
    return {
        **{
            "devices": devices,
            "device": "cpu",
            "efficiency": 0.85,
            "toy": ways(weak_2=1.05, strong_2=0.5, apart_2=1.01),
            "runs": [],
        },
        **({"count": 2, "points": points} if devices > 1 else {"count": 0, "points": []}),
    }


def c03() -> Measurements:
    def rank(number: int, on: bool) -> dict[str, Any]:
        counters = [100.0, 101.0] if on else [100.0 + 50 * number, 200.0 + 50 * number]
        weights = {"weights": [1.0], "weights_changed": [1.0 + number]}
        return weights | {"counters": counters, "counter_after_construction": counters[0]}

    return {"by_ranks": {"2": {"on": [rank(0, True), rank(1, True)], "off": [rank(0, False), rank(1, False)]}}}


def c04() -> Measurements:
    seconds = {"overlapped": around(1.0), "after": around(1.2), "none": around(0.8), "alone": around(0.4)}
    looks = {"looks during backward": 30, "changed during backward": 0, "changed after step": 3, "steps": 3}
    return {
        **{"devices": 2, "ranks": 2, "device": "cpu", "megabits": 1000, "steps": 1, "copying_share": 0.2},
        **{"judged": {"seconds": seconds}, "unshaped": {"seconds": seconds | {"alone": around(0.04)}}},
        "changes": [dict(looks), dict(looks)],
    }


def c05() -> Measurements:
    def network() -> dict[str, Any]:
        seconds = {"1 MB": around(1.1), "25 MB": around(1.0), "one by one": around(5.0)}
        return {"steps": 1, "tensors": 9, "messages": dict.fromkeys(seconds, 9), "seconds": seconds}

    networks = {"narrow": network(), "resnet18": network()}
    return {"devices": 2, "ranks": 2, "default": 25.0, "found_default": 25.0, "margin": 0.01, "networks": networks}


def c06(device: str = "cuda") -> Measurements:
    ways = ("dp",)
    if device == "cpu":
        ways = ("threads that stay", "nn.DataParallel's step rendered on CPU", "threads that stay, micro-batches")
    found = {
        name: {
            "steps": 1,
            "seconds": {way: around(dp) for way in ways} | {"ddp": around(1.0), "ddp, micro-batches": around(1.0)},
        }
        for name, dp in (("digits", 1.3), ("resnet18", 1.1))
    }
    return {"devices": 2, "replicas": 2, "device": device, "experiments": found}


def c07() -> Measurements:
    dp = {"memory": [2e9, 1e9], "busy": [2.0, 1.0]}
    even = {"memory": [1e9, 1e9], "busy": [1.0, 1.0]}
    return {"cuda_devices": 2, "steps": 10, "layouts": {"dp": dp, "ddp": even}}


def c08() -> Measurements:
    ranks = [{"sent": 153.0, "received": 153.0, "gradients": 100, "buffers": 3} for _ in range(4)]
    replicas = {"weights": 309.0, "gradients": 300.0, "batch": 9.0, "parameters": 100, "buffers": 3}
    return {
        **{"countable": True, "off_by_at_most": 0.05, "by_devices": {"4": {"ddp": ranks, "replicas": replicas}}},
        **{"cuda_devices": 2, "cuda": {"devices": 2, "parameters": 100, "weights": 103.0, "gradients": 100.0}},
    }


SAME = (((0, 1), (0, 1)), ((2, 3), (2, 3)))
OTHER = (((0, 1), (2, 1)), ((2, 3), (0, 3)))
"""Ids by rank and epoch: the same in both epochs, and others in the second."""


def c09(without: Any = SAME, with_: Any = OTHER) -> Measurements:
    return {"samples": 4, "ids": {"without": without, "with": with_, "with_unshuffled": without}}


def c10() -> Measurements:
    case = {"ranks": 2, "length": 97, "left_out": 0, "repeated": 0}
    return {
        "cases": [
            {"sampler": "torch"} | case,
            {"sampler": "elastic"} | case,
            {"sampler": "torch"} | case | {"length": 96},
        ]
    }


def c11(tree: float = 0.5, ring: float = 0.1, broadcast: float = 0.6, bent: bool = False) -> Measurements:
    """The slopes are in units of the send loop's."""

    def way(slope: float) -> dict[str, list[float]]:
        return {str(count): around(0.1 + slope * 0.2 * (count - 1)) for count in (2, 3, 4, 5, 6)}

    ways = {"send loop": way(1.0), "tree": way(tree), "ring": way(ring), "dist.broadcast": way(broadcast)}
    if bent:
        ways["send loop"] = {str(count): around(0.1 + 0.05 * (count - 1) ** 2) for count in (2, 3, 4, 5, 6)}
    fast = {name: {count: around(0.01) for count in by_count} for name, by_count in ways.items()}
    return {
        **{"ranks": 6, "device": "cpu", "megabits": 200, "megabytes": 5, "judged": {"seconds": ways, "leaving": {}}},
        "unshaped": {"seconds": fast, "leaving": {"send loop": 5.0, "tree": 3.0}},
        "limits": {"slope_at_most": 0.75, "copying_share": 0.2},
    }


def c12() -> Measurements:
    right = {"micro_batches": 4, "loss": "mean", "rescaled": True, "difference": 2e-7, "factor": 1.0}
    return {
        "square": [8.0, 16.0],
        "ranks": 2,
        "tolerance": 1e-6,
        "cases": [
            {"where": "one process"} | right,
            {"where": "DDP", "no_sync": True} | right,
            {"where": "one process"} | right | {"rescaled": False, "difference": 3.0, "factor": 4.0},
            {"where": "BatchNorm"} | right | {"loss": "sum", "difference": 3e-7},
        ],
    }


def c13() -> Measurements:
    losses = {
        "64": {"rank0": 2.0, "all_ranks": 2.0, "own_rank0": 2.0, "own_all_ranks": 2.0},
        "5": {"rank0": 2.0, "all_ranks": 2.0, "own_rank0": 2.0, "own_all_ranks": 2.0},
    }
    seconds = {"rank0": around(1.0), "all_ranks": around(0.5), "own_rank0": around(1.0), "own_all_ranks": around(0.6)}
    case = {"ranks": 2, "losses": losses, "samples": 64, "seconds": seconds}
    return {"devices": 2, "agree_to": 1e-6, "cases": [case]}


def c14() -> Measurements:
    case = {"layout": "single", "killed_after": [7, 31], "newest": [5, 30], "resumed_at": [5, 30], "exit_code": 0}
    case |= {"weights_sha256": "a"}
    opened = {"0": [".step-00005.pt.0123456789ab.tmp", "fence.lock"], "1": []}
    damaged = {"rounds": 16, "at_return": 9, "at_end": 4}
    torch_alone = {"way": "weights", "killed_after": 21, "killed": True, "newest": 2, "resumed_at": 2}
    torch_alone |= {"resumed_loss": 19.0, "first_loss": 180.0, "weights_sha256": "b", "undisturbed": "a"}
    return {
        "undisturbed": "a",
        "torch_alone": [torch_alone, torch_alone | {"way": "weights and optimizer", "weights_sha256": "a"}],
        "cases": [case, case | {"layout": "ddp"}],
        "written": {"ranks": 2, "opened": opened, "files": ["fence.lock", "step-00005.pt"]},
        "shared_path": {"alone": damaged | {"at_return": 0, "at_end": 0}, "different": damaged, "equal": dict(damaged)},
    }


def c15() -> Measurements:
    case = {"launcher": "torchrun", "ranks": 2, "exit_code": 0, "weights_sha256": "abc", "said": ""}
    return {"cases": [case, case | {"launcher": "spawn"}]}


def c16() -> Measurements:
    losses = {(1, "k = 1"): 0.05}
    for factor in (2, 8):
        losses |= {(factor, "none"): 0.2, (factor, "square root"): 0.08, (factor, "linear"): 0.052}
        losses |= {(factor, "twice linear"): 0.06}
    searched = [
        {"rate": rate, "seed": 1000, "loss": loss}
        for rate, loss in ((0.04, 0.2), (0.08, 0.1), (0.16, 0.06), (0.32, 0.07))
    ]
    return {
        **{"epochs": 6, "batch": 32, "rate": 0.16, "edge": False, "kept_ratio": 1.25, "searched": searched},
        "cases": [
            {"factor": factor, "rule": rule, "seed": seed, "loss": loss * (1 + 0.01 * seed)}
            for (factor, rule), loss in losses.items()
            for seed in SEEDS
        ],
    }


def c17() -> Measurements:
    """Pauses of 0.02 s: synchronous workers wait 0.019 s longer because of them, asynchronous ones 0.0002 s."""
    waits = {("synchronous", 0.02): 0.021, ("synchronous", 0.0): 0.002}
    waits |= {("asynchronous", 0.02): 0.0012, ("asynchronous", 0.0): 0.001}
    heights = {"synchronous": 0.1, "asynchronous": 0.15}
    facts = {"staleness": 2.0, "gradients_per_second": 100.0, "wait_percent": 50.0}
    return {
        "delayed": [
            {"staleness": staleness, "seed": seed, "losses": wave(0.1 * (1 + staleness) * (1 + 0.01 * seed))}
            for seed in SEEDS
            for staleness in (0, 8)
        ],
        "server": [
            {"seed": seed, "way": way, "pause": pause, "wait_seconds": wait * (1 + 0.01 * seed)}
            | {"losses": spread(heights[way], 3)}
            | facts
            for seed in SEEDS
            for (way, pause), wait in waits.items()
        ],
        "more": [
            {"seed": seed, "way": way, "pause": 0.0, "wait_seconds": 0.0} | facts | {"losses": spread(height, 8)}
            for seed in SEEDS
            for way, height in heights.items()
        ],
        "alone": [{"seed": seed, "losses": spread(0.1, 3)} for seed in SEEDS],
        **{"workers": 3, "more_workers": 8, "share_called_waiting": 0.5, "share_called_none": 0.1},
        "jitter_called_none": 1.1,
    }


def c18() -> Measurements:
    killed = {"killed_after": 29, "killed": True, "last_step": 29}
    alone = killed | {"exit_code": 6, "status": "failed", "weights_sha256": None}
    again = killed | {"exit_code": 0, "status": "completed", "weights_sha256": "a", "last_step": 66}
    return {
        "undisturbed": "a",
        "steps": 66,
        "alone": [killed | {"exit_code": 1} for _ in range(2)],
        "without_restart": [alone | {"seconds_lost": None, "steps_lost": None} for _ in range(2)],
        "with_restart": [again | {"seconds_lost": 4.0, "steps_lost": 9}],
    }


def c19(device: str = "cuda", dp: float = 2e-7, ddp: float = 1e-7) -> Measurements:
    """On a CUDA machine: DP ends farther from a single device than DDP."""
    layouts = (("single", 1), ("dp", 2), ("ddp", 2))
    exact = [{"layout": layout, "count": count, "weights_sha256": "d"} for layout, count in layouts]
    cases = [
        {"seed": seed, "digests": ["a", "a"], "dp": dp * (1 + 0.01 * seed), "ddp": ddp * (1 + 0.01 * seed)}
        for seed in SEEDS
    ]
    return {"device": device, "ranks": 2, "steps": 40, "cases": cases, "exact": exact}


def c20() -> Measurements:
    alone = {"workers": 2, "prefetch_factor": 2, "processes": 2, "main_process_fetched": False, "batches_ready": 4.0}
    return {
        **{"cores": 2, "device": "cpu", "judged": "2", "alone": alone},
        "samples_per_second": {"0": around(100.0), "1": around(150.0), "2": around(180.0)},
        "wait_percent": {"0": around(50.0), "1": around(20.0), "2": around(10.0)},
    }


def c21(device: str = "cuda", batch: int = 256) -> Measurements:
    case = {"completed": True, "steps": [2, 3, 4, 5], "losses": [2.5, 2.4, 1.9, 1.7]}
    case |= {"images_per_second": 4.0, "peak_memory_bytes": 2**30}
    cases = {layout: deepcopy(case) for layout in ("dp", "ddp")}
    ranks = [{"losses": [2.5, 2.4, 2.2], "images_per_second": 5.0, "peak_memory_bytes": 5 * 2**30} for _ in range(2)]
    whole = {"needed": 5 * 2**30, "free": 9 * 2**30, "steps": 3, "ranks": ranks, "said": ""}
    return {"device": device, "global_batch_size": batch, "images": 2 * batch, "cases": cases, "whole": whole}


def c22() -> Measurements:
    trained = {"trained": True, "losses": [2.0, 1.0], "out_of_memory": False, "said": ""}
    full = {"trained": False, "losses": [], "out_of_memory": True, "said": "no memory"}
    ways = {"fits, DDP": trained, "too many, no limit": trained, "too many, one process": full}
    ways |= {"too many, DDP": full, "too many, halves": trained}
    return {
        **{"tolerance": 0.15, "limit_mib": 320, "relative_difference_of_loss": 1e-6, "device": "cpu"},
        "cases": [{"name": "a", "estimate": 110, "peak": 100}],
        "limited": {way: deepcopy(found) for way, found in ways.items()},
    }


MEASUREMENTS = {name: make for name, make in globals().items() if name[:1] == "c" and name[1:].isdigit()}
"""By the claim's number."""

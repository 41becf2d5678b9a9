"""Time collectives between processes of this machine, and how much of them DDP's backward hides."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_lab.claims.measuring.ranks import run_ranks
from ddp_lab.projection.fit import Point

COLLECTIVES: tuple[Any, ...] = ("all_reduce", "broadcast", "send")


def measure_collectives(
    ranks: Sequence[int], sizes: Sequence[int], rounds: int, say: Callable[[str], None]
) -> list[Point]:
    """The fastest round of each collective, number of ranks and size: other work here can only add time."""
    points = []
    for count in ranks:
        say(f"collectives between {count} processes")
        seconds = run_ranks(_time_collectives, count, list(sizes), rounds, timeout=300)[0]
        points += [Point(name, count, size, min(seconds[name][str(size)])) for name in COLLECTIVES for size in sizes]
    return points


def measure_steps(ranks: int, rounds: int) -> tuple[dict[str, float], list[list[float]]]:
    """Seconds of a training step, and each rank's own of every round without communication.

    The step is made without communication (`alone`), with DDP's (`ddp`), and with communication after backward
    (`afterwards`); the slowest rank counts.
    """
    found = run_ranks(_time_steps, ranks, rounds, timeout=300)
    return {name: _quartile(values) for name, values in found[0][0].items()}, [own for _, own in found]


def hidden_share(steps: dict[str, float]) -> float | None:
    """The part of communication that costs no time under DDP; None where communication could not be told from noise."""
    communication = steps["afterwards"] - steps["alone"]
    if communication <= 0.02 * steps["alone"]:
        return None
    return max(0.0, min(1.0, (steps["afterwards"] - steps["ddp"]) / communication))


def _quartile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]


def _time_collectives(rank: int, world_size: int, sizes: list[int], rounds: int) -> dict[str, dict[str, list[float]]]:
    seconds: dict[str, dict[str, list[float]]] = {name: {str(size): [] for size in sizes} for name in COLLECTIVES}
    tensors = {size: torch.zeros(size // 4) for size in sizes}

    def send(tensor: torch.Tensor) -> None:
        if rank == 0:
            for other in range(1, world_size):
                dist.send(tensor, other)
        else:
            dist.recv(tensor, 0)

    ways: dict[str, Callable[[torch.Tensor], Any]] = {
        "all_reduce": dist.all_reduce,
        "broadcast": lambda tensor: dist.broadcast(tensor, 0),
        "send": send,
    }
    for turn in range(-2, rounds):
        for size in sizes:
            for name, way in ways.items():
                _, taken = _together(lambda way=way, size=size: way(tensors[size]))  # type: ignore[misc]
                if turn >= 0:
                    seconds[name][str(size)].append(taken)
    return seconds


def _time_steps(rank: int, world_size: int, rounds: int) -> tuple[dict[str, list[float]], list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())])
    module = DistributedDataParallel(model, bucket_cap_mb=1)
    inputs = torch.randn(256, 512)

    def step(sync: bool) -> None:
        for parameter in model.parameters():
            parameter.grad = None
        if sync:
            module(inputs).square().mean().backward()
        else:
            with module.no_sync():
                module(inputs).square().mean().backward()

    def afterwards() -> None:
        step(False)
        # As many all-reduces as DDP makes, of about as many bytes, but after backward.
        for layer in range(0, len(model), 2):
            flat = torch.cat([p.grad.flatten() for p in model[layer].parameters() if p.grad is not None])
            dist.all_reduce(flat)

    ways = {"alone": lambda: step(False), "ddp": lambda: step(True), "afterwards": afterwards}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    alone = []
    for turn in range(-2, rounds):
        for name, way in ways.items():
            own, slowest = _together(way)
            if turn >= 0:
                seconds[name].append(slowest)
                alone += [own] if name == "alone" else []
    return seconds, alone


def _together(action: Callable[[], Any]) -> tuple[float, float]:
    """Seconds from the common start of all ranks until this rank is done, and until the slowest rank is."""
    dist.all_reduce(torch.zeros(1))
    began = time.perf_counter()
    action()
    own = time.perf_counter() - began
    slowest = torch.tensor([own], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return own, float(slowest)

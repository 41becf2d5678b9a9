"""What sharding the optimizer costs and saves: steps of plain and exact DDP, with and without shards, and their memory.

    python -m benchmarks.sharded [--worlds 2 4] [--rounds 15] [--return-memory] [--quick] [--json PATH]

A network of 25 million parameters, AdamW (fused), and micro-batches so small that hardly anything but gradients,
updates and parameters takes time. The ways take turns in one run, each with a model of its own; the slowest rank
counts; ratios are medians over the rounds. ZeRO is torch's ZeroRedundancyOptimizer in plain DDP. Processes keep freed
memory, as those of `ddp train` do; with --return-memory they hand it back to the kernel, as bare scripts do.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.record import record
from benchmarks.reduction import on_ranks, wrapped
from benchmarks.turns import rotated
from ddp_core.base.process import keep_freed_memory
from ddp_core.reduction import ExactReduction
from ddp_core.sharding import OwnsPieces

LAYERS, WIDTH, ROWS = 25, 1000, 16
WARM_UP = 2
WAYS = ("plain DDP", "plain DDP, ZeRO", "exact", "exact, optimizer", "exact, gradients")


class Contender:
    """A network, what reduces its gradients, and its optimizer."""

    def __init__(self, way: str, layers: int, own: int) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(*(each for _ in range(layers) for each in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
        self.own, self.rows = own, torch.randn(ROWS, WIDTH)
        self.close: list[Callable[[], None]] = []
        self.optimizer: torch.optim.Optimizer
        self.step: Callable[[], None]
        if way.startswith("plain"):
            self.module: nn.Module = DistributedDataParallel(self.net, gradient_as_bucket_view=True)
            self.optimizer = torch.optim.AdamW(self.net.parameters(), fused=True)
            if way.endswith("ZeRO"):
                self.optimizer = ZeroRedundancyOptimizer(self.net.parameters(), torch.optim.AdamW, fused=True)
            self.step = self._plain_step
        else:
            self.optimizer = torch.optim.AdamW(self.net.parameters(), fused=True)
            self.exact = self._exact(way)
            self.step = self._exact_step

    def _exact(self, way: str) -> ExactReduction:
        group = dist.group.WORLD
        assert group is not None
        # As plain DDP does, which gives the mean over ranks of each rank's sum.
        world_size = self.world_size = group.size()
        if way == "exact":
            exact = ExactReduction(wrapped(self.net), self.own * world_size)
        else:
            shares: Literal["contiguous", "strided"] = "strided" if way.endswith("gradients") else "contiguous"
            owned = OwnsPieces(self.net, self.optimizer, self.own * world_size, process_group=group, shares=shares)
            exact = owned.reduction
            self.close.append(owned.close)
        self.close.append(exact.close)
        return exact

    def _plain_step(self) -> None:
        assert isinstance(self.module, DistributedDataParallel)
        self.optimizer.zero_grad()
        for _ in range(self.own - 1):
            with self.module.no_sync():
                self.module(self.rows).sum().backward()
        self.module(self.rows).sum().backward()
        self.optimizer.step()

    def _exact_step(self) -> None:
        for index in self.exact.share:
            with self.exact.micro_batch(index):
                self.exact.module(self.rows).sum().backward()
        self.exact.finish(scale=1 / self.world_size)
        self.optimizer.step()

    def state_bytes(self) -> int:
        """Bytes of this rank's optimizer state."""
        optimizer = self.optimizer.optim if isinstance(self.optimizer, ZeroRedundancyOptimizer) else self.optimizer
        values = [value for state in optimizer.state.values() for value in state.values()]
        return sum(value.nbytes for value in values if isinstance(value, Tensor))


def time_steps(
    rank: int, world_size: int, rounds: int, layers: int, own: int, return_memory: bool
) -> dict[str, dict[str, Any]]:
    """By way: seconds of the slowest rank in each round, and the bytes of the fullest rank's optimizer state."""
    if not return_memory:
        keep_freed_memory()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        contenders = {way: Contender(way, layers, own) for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(rounds + WARM_UP):
        for way in rotated(WAYS, turn):
            dist.barrier()
            start = time.perf_counter()
            contenders[way].step()
            elapsed = _largest(time.perf_counter() - start)
            if turn >= WARM_UP:
                seconds[way].append(elapsed)
    found = {way: {"seconds": seconds[way], "state_bytes": _largest(contenders[way].state_bytes())} for way in WAYS}
    for contender in contenders.values():
        for close in contender.close:
            close()
    return found


def _largest(value: float) -> float:
    """The largest of all ranks' values."""
    box = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return box.item()


def measure(
    worlds: list[int], rounds: int, layers: int, shares: tuple[int, ...], return_memory: bool
) -> dict[str, Any]:
    """All figures, printed as they come."""
    rows = []
    print(f"{layers * WIDTH * (WIDTH + 1):,} parameters, AdamW, medians of {rounds} rounds in turns")
    print("ranks micro-batches per rank  way                ms a step / plain  / ZeRO state MB")
    for world_size in worlds:
        for own in shares:
            found = on_ranks(time_steps, world_size, rounds, layers, own, return_memory)
            plain, zero = (found[way]["seconds"] for way in WAYS[:2])
            for way, figures in found.items():
                figures["of_plain"] = _ratio(figures["seconds"], plain)
                figures["of_zero"] = _ratio(figures["seconds"], zero)
                print(
                    f"{world_size:5} {own:22}  {way:<18} {1e3 * statistics.median(figures['seconds']):9.1f} "
                    f"{figures['of_plain']:7.2f} {figures['of_zero']:7.2f} {figures['state_bytes'] / 1e6:8.1f}"
                )
            rows.append({"world_size": world_size, "micro_batches_per_rank": own, "ways": found})
    return {"parameters": layers * WIDTH * (WIDTH + 1), "memory_returned": return_memory, "steps": rows}


def _ratio(seconds: list[float], base: list[float]) -> float:
    return statistics.median(ours / theirs for ours, theirs in zip(seconds, base, strict=True))


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--return-memory", action="store_true", help="hand freed memory back to the kernel")
    parser.add_argument("--quick", action="store_true", help="a small network on two ranks, three rounds")
    parser.add_argument("--json", type=Path, help="where to record the results (default: benchmarks/results)")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.worlds, arguments.rounds = [2], 3
    size: tuple[int, tuple[int, ...]] = (2, (1,)) if arguments.quick else (LAYERS, (1, 4))
    found = measure(arguments.worlds, arguments.rounds, *size, arguments.return_memory)
    print(record("sharded", "python -m benchmarks.sharded", found, arguments.json, arguments.rounds))


if __name__ == "__main__":
    main()

"""What exact reduction costs: the ordered sum against gloo's all_reduce, strided shares, memory in gradients' copies.

    python -m benchmarks.reduction [--worlds 2 4] [--rounds 15] [--json PATH]

Times: 11 million float32 (a ResNet-18), as one tensor, and cut into pieces of 1 million as DDP's buckets are. The two
ways take turns in one run; the slowest rank counts; figures are medians. Shares: steps of a network of 11 million
parameters with tiny micro-batches, so that hardly anything but the gradients takes time: accumulation alone, contiguous
shares (plain module, and DDP, which overlaps with the last backward), strided shares (plain module). Memory: the
highest resident size of a rank that trains that network with DDP, exact less plain accumulation under no_sync, divided
by the size of the gradients. log2(M / W) copies are expected, which the tree holds. The tree's own leaf is one more,
but DDP has that too, as `.grad`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import math
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.record import record
from ddp_core.reduction import ExactReduction, OrderedSum

ELEMENTS = 11_000_000
LAYERS, WIDTH = 11, 1000
TARGETS = {2: 1.10, 4: 1.15}


def time_sums(rank: int, world_size: int, rounds: int, piece: int) -> dict[str, list[float]]:
    """Seconds of the slowest rank per round: gloo's all_reduce and the ordered sum, in turns."""
    ordered_sum = OrderedSum(dist.group.WORLD)
    flat = torch.randn(ELEMENTS)
    ways: dict[str, Callable[[Tensor], Any]] = {
        "all_reduce": dist.all_reduce,
        "ordered": lambda part: ordered_sum([part], part, world_size),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 2):
        for way, reduce in ways.items():
            taken = time_sum(reduce, flat, piece)
            if turn >= 2:
                seconds[way].append(taken)
    return seconds


def time_sum(reduce: Callable[[Tensor], Any], flat: Tensor, piece: int) -> float:
    """Seconds of the slowest rank for a sum in pieces; `flat` holds the mean afterwards, so that it does not grow."""
    dist.barrier()
    start = time.perf_counter()
    for part in torch.split(flat, piece):
        reduce(part)
    elapsed = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    flat.div_(dist.get_world_size())
    return elapsed.item()


def network() -> nn.Sequential:
    """11 million parameters."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def wrapped(net: nn.Module) -> DistributedDataParallel:
    """The network as the exact reduction takes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(net, broadcast_buffers=False, gradient_as_bucket_view=True)


def time_shares(rank: int, world_size: int, rounds: int, own: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of the slowest rank and processor seconds of one, in turns, with `own` micro-batches per rank."""
    group, micro_batches, rows = dist.group.WORLD, own * world_size, torch.randn(4, WIDTH)
    torch.manual_seed(0)
    exact = {
        "contiguous": ExactReduction(network(), micro_batches, process_group=group),
        "contiguous, DDP": ExactReduction(wrapped(network()), micro_batches),
        "strided": ExactReduction(network(), micro_batches, process_group=group, shares="strided"),
    }
    alone = network()

    def accumulate() -> None:
        alone.zero_grad()
        for _ in range(own):
            alone(rows).sum().backward()

    def step(reduction: ExactReduction) -> None:
        for index in reduction.share:
            with reduction.micro_batch(index):
                reduction.module(rows).sum().backward()
        reduction.finish()

    ways: dict[str, Callable[[], None]] = {"accumulation": accumulate}
    ways |= {way: functools.partial(step, reduction) for way, reduction in exact.items()}
    found: dict[str, dict[str, list[float]]] = {way: {"seconds": [], "processor": []} for way in ways}
    for turn in range(rounds + 2):
        for way, run in ways.items():
            dist.barrier()
            start, work = time.perf_counter(), time.process_time()
            run()
            work = time.process_time() - work
            elapsed = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
            if turn >= 2:
                found[way]["seconds"].append(elapsed.item())
                found[way]["processor"].append(work)
    for reduction in exact.values():
        reduction.close()
    return found


def peak_memory(rank: int, world_size: int, micro_batches: int, exact: bool) -> int:
    """Highest resident bytes of this process while it trains three steps."""
    net = network()
    module = wrapped(net)
    rows = torch.randn(4, WIDTH)
    Path("/proc/self/clear_refs").write_text("5")  # start the high-water mark anew
    if exact:
        with ExactReduction(module, micro_batches) as reduction:
            for _ in range(3):
                for index in reduction.share:
                    with reduction.micro_batch(index):
                        module(rows).sum().backward()
                reduction.finish()
    else:
        own = micro_batches // world_size
        for _ in range(3):
            net.zero_grad()
            for index in range(own):
                with module.no_sync() if index < own - 1 else contextlib.nullcontext():
                    module(rows).sum().backward()
    status = Path("/proc/self/status").read_text().split()
    return 1024 * int(status[status.index("VmHWM:") + 1])


def _enter(rank: int, function: Callable[..., Any], world_size: int, arguments: tuple[Any, ...], results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    result = function(rank, world_size, *arguments)
    gc.collect()
    dist.destroy_process_group()
    if rank == 0:
        results.put(result)


def on_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> Any:
    """Run `function(rank, world_size, *arguments)` on as many processes; return what rank 0 returned."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(29500 + os.getpid() % 1000), OMP_NUM_THREADS="1")
    results = mp.get_context("spawn").SimpleQueue()
    mp.start_processes(_enter, (function, world_size, arguments, results), nprocs=world_size, start_method="spawn")
    return results.get()


def measure(worlds: list[int], rounds: int) -> dict[str, Any]:
    """All figures, printed as they come."""
    times = []
    print(f"{ELEMENTS:,} float32, medians of {rounds} rounds in turns")
    print("world_size  pieces  all_reduce     ordered     ratio   target")
    for world_size in worlds:
        for piece in (ELEMENTS, 1_000_000):
            seconds = on_ranks(time_sums, world_size, rounds, piece)
            medians = {way: statistics.median(values) for way, values in seconds.items()}
            row = {
                "world_size": world_size,
                "pieces": math.ceil(ELEMENTS / piece),
                "all_reduce_ms": 1e3 * medians["all_reduce"],
                "ordered_ms": 1e3 * medians["ordered"],
                "ratio": medians["ordered"] / medians["all_reduce"],
                "target": TARGETS.get(world_size),
                "rounds_ms": {way: [1e3 * value for value in values] for way, values in seconds.items()},
            }
            times.append(row)
            print(
                f"{world_size:10} {row['pieces']:7} {row['all_reduce_ms']:8.1f} ms {row['ordered_ms']:8.1f} ms "
                f"{row['ratio']:8.2f} {row['target'] or '-':>8}"
            )
    shares = []
    print("\nms a step (processor ms of a rank)")
    print("ranks  micro-batches per rank    accumulation      contiguous contiguous, DDP         strided")
    for world_size in worlds:
        for own in (1, 2, 4):
            found = on_ranks(time_shares, world_size, rounds, own)
            shares.append({"world_size": world_size, "micro_batches_per_rank": own, "ways": found})
            cells = [
                f"{1e3 * statistics.median(way['seconds']):.1f} ({1e3 * statistics.median(way['processor']):.1f})"
                for way in found.values()
            ]
            print(f"{world_size:5} {own:23} " + " ".join(f"{cell:>15}" for cell in cells))
    memory = []
    gradients = 4 * LAYERS * WIDTH * WIDTH
    print("\nmicro-batches per rank   extra copies of the gradients   log2(M / W)")
    for own in (1, 2, 4, 8):
        plain = on_ranks(peak_memory, 2, 2 * own, False)
        exact = on_ranks(peak_memory, 2, 2 * own, True)
        copies = (exact - plain) / gradients
        memory.append({"micro_batches_per_rank": own, "extra_copies": copies, "expected": math.log2(own)})
        print(f"{own:22} {copies:31.2f} {math.log2(own):13.0f}")
    return {"elements": ELEMENTS, "sum": times, "shares": shares, "memory": memory}


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="where to record the results (default: benchmarks/results)")
    arguments = parser.parse_args()
    found = measure(arguments.worlds, arguments.rounds)
    print(record("reduction", "python -m benchmarks.reduction", found, arguments.json, arguments.rounds))


if __name__ == "__main__":
    main()

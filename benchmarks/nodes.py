"""What ordered sums cost across nodes: in one level, in two, and gloo's all_reduce, on links of several speeds.

    python -m benchmarks.nodes [--shapes 2x2 2x4 2x8 3x2] [--rates 200 1000 0] [--rounds 15] [--json PATH]

Nodes are network namespaces of this machine, joined by a switch; each node's link is slowed down by a token bucket
(needs root, `ip` and `tc`). One tensor of 1 million float32 (4 MB, a bucket of DDP) is summed, by all ways in turns,
of which another begins each round; the slowest rank counts, figures are medians. "all_reduce, two levels" is gloo's
own sum within each node, between one rank of each, and back. "Parts" are sums of which each rank gets its part, and the
way back: a round of strided shares and the end of its step, or what a step with --shard optimizer sends. Processor time
is that of all ranks together; bytes are those that left node 0, headers included.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from benchmarks.record import record
from benchmarks.turns import rotated
from ddp_core.distributed.world import free_port
from ddp_core.reduction import OrderedSum
from ddp_core.reduction.parts import Parts, parts_on
from ddp_core.reduction.strided import RoundSum
from ddp_lab.claims.measuring import namespaces

ELEMENTS = 1_000_000
TARGETS = {200: 0.62, 1000: 0.80, 0: 1.00}


def time_ways(rank: int, nodes: int, per_node: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """For each way, in turns: seconds of the slowest rank, processor seconds of all, and bytes out of node 0."""
    world_size = nodes * per_node
    members = [range(node * per_node, (node + 1) * per_node) for node in range(nodes)]
    flat, levels = OrderedSum(dist.group.WORLD), OrderedSum(dist.group.WORLD, members)
    within, _ = dist.new_subgroups_by_enumeration([[*each] for each in members])
    leaders = dist.new_group([each[0] for each in members])
    gradients = torch.randn(ELEMENTS)
    ways: dict[str, Callable[[Tensor], Any]] = {
        "all_reduce": dist.all_reduce,
        "all_reduce, two levels": functools.partial(sum_in_levels, within, leaders, members[rank // per_node][0]),
        "one level": lambda part: flat([part], part, world_size),
        "two levels": lambda part: levels([part], part, world_size),
    }
    for level, groups in (("one level", ()), ("two levels", levels.groups)):
        ways[f"parts, {level}"] = functools.partial(
            sum_parts, parts_on(dist.group.WORLD, groups, torch.device("cpu")), world_size
        )
    found: dict[str, dict[str, list[float]]] = {way: {"seconds": [], "processor": [], "bytes": []} for way in ways}
    for turn in range(rounds + 2):
        for way in rotated(ways, turn):
            reduce = ways[way]
            dist.barrier()
            sent = namespaces.bytes_out()
            start, work = time.perf_counter(), time.process_time()
            reduce(gradients)
            spent = torch.tensor(time.process_time() - work, dtype=torch.float64)
            elapsed = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
            dist.all_reduce(spent)
            gradients.div_(world_size)
            if turn >= 2:
                found[way]["seconds"].append(elapsed.item())
                found[way]["processor"].append(spent.item())
                found[way]["bytes"].append(namespaces.bytes_out() - sent)
    return found


def sum_in_levels(within: dist.ProcessGroup, leaders: dist.ProcessGroup, leader: int, part: Tensor) -> None:
    """Sum `part` by gloo within each node, between the nodes' leaders, and hand it back."""
    dist.reduce(part, leader, group=within)
    if dist.get_rank() == leader:
        dist.all_reduce(part, group=leaders)
    dist.broadcast(part, leader, group=within)


def sum_parts(parts: Parts, world_size: int, part: Tensor) -> None:
    """Sum one micro-batch of each rank, part by part, and gather the parts."""
    total = RoundSum(parts, ELEMENTS, part, world_size)
    for _ in total.push(part.clone()):
        pass
    part.copy_(total.total())


def _enter(rank: int, port: int, nodes: int, per_node: int, rounds: int, results: Any) -> None:
    namespaces.enter(rank // per_node)
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR=namespaces.address(0), MASTER_PORT=str(port))
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", timeout=limit, rank=rank, world_size=nodes * per_node)
    found = time_ways(rank, nodes, per_node, rounds)
    gc.collect()
    dist.destroy_process_group()
    if rank == 0:
        results.put(found)


def measure(shapes: list[str], rates: list[int], rounds: int) -> list[dict[str, Any]]:
    """All figures, printed as they come."""
    print(f"{ELEMENTS:,} float32, medians of {rounds} rounds in turns; processor ms of all ranks; MB out of node 0")
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        nodes, per_node = map(int, shape.split("x"))
        for rate in rates:
            with namespaces.joined(nodes):
                for node in range(nodes) if rate else ():
                    namespaces.slow_down(node, rate)
                # Forks have torch loaded; no thread has been started that they would miss.
                results = mp.get_context("fork").SimpleQueue()
                arguments = (free_port(), nodes, per_node, rounds, results)
                mp.start_processes(_enter, arguments, nprocs=nodes * per_node, start_method="fork")
                found = results.get()
            medians = {way: statistics.median(values["seconds"]) for way, values in found.items()}
            ratios = {way: medians[way] / medians["all_reduce"] for way in medians}
            rows.append(
                {
                    "nodes": nodes,
                    "ranks_per_node": per_node,
                    "mbit_per_second": rate or None,
                    "ratios": ratios,
                    "of_two_levels": medians["two levels"] / medians["all_reduce, two levels"],
                    "target": TARGETS.get(rate),
                    "ways": found,
                }
            )
            print(f"{shape}, {f'{rate} Mbit/s' if rate else 'unshaped'}; target {TARGETS.get(rate, '-')}")
            for way, values in found.items():
                print(
                    f"{way:>22} {1e3 * medians[way]:5.0f} ms ({1e3 * statistics.median(values['processor']):4.0f}) "
                    f"{statistics.median(values['bytes']) / 1e6:4.1f} MB {ratios[way]:5.2f}",
                    flush=True,
                )
    return rows


def main() -> int:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["2x2", "2x4", "2x8", "3x2"], metavar="NODESxRANKS")
    parser.add_argument("--rates", type=int, nargs="+", default=[200, 1000, 0], help="Mbit/s; 0: as fast as it goes")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="where to record the results (default: benchmarks/results)")
    arguments = parser.parse_args()
    if os.geteuid():
        print("network namespaces need root: run this as root", file=sys.stderr)
        return 2
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    results = measure(arguments.shapes, arguments.rates, arguments.rounds)
    where = record("nodes", "python -m benchmarks.nodes", results, arguments.json, arguments.rounds)
    print(f"recorded in {where}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

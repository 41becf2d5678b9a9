"""What the exact reduction costs a whole training step: ResNet-18 on 32x32 images, one thread per rank.

    python -m benchmarks.exact_end_to_end [--worlds 1 2] [--rounds 15] [--batch 64] [--micro-batch 16] [--json PATH]

`Trainer.train()` on W ranks over gloo, three ways in turns within one process group: exact; plain DDP with the same
micro-batches; plain DDP with one batch per rank. W = 1 is `single`. The time per step leaves out the first step of a
turn. Each figure is the ratio of exact's time to the other way's in the same round, as the median over the rounds. For
a machine that others disturb there are also the ratio of the fastest turns, and that of rank 0's processor time.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.loops import Case, experiment_of, splits_of, trainer_turn
from benchmarks.record import record
from benchmarks.turns import Seconds, rotated, summary

WAYS = {"exact": "exact", "plain, same micro-batches": "plain", "plain, one batch per rank": "plain"}
TARGETS = {("plain, same micro-batches", 2): 1.03}


def _rank(rank: int, world_size: int, port: int, case: Case, rounds: int, results: Any) -> None:
    import torch

    from ddp_core.base.determinism import choose_kernels
    from ddp_core.base.process import keep_freed_memory
    from ddp_core.config.layout import Layout
    from ddp_core.distributed.process_group import process_group
    from ddp_core.distributed.world import World

    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    choose_kernels()
    keep_freed_memory()
    layout = Layout(kind="ddp", nproc_per_node=world_size) if world_size > 1 else Layout()
    splits = splits_of(case)
    seconds: dict[str, list[Seconds]] = {way: [] for way in WAYS}
    with (
        process_group(World.from_environment(), torch.device("cpu"), timeout=60.0) as collectives,
        open(os.devnull, "w") as nowhere,  # noqa: PTH123
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        for turn in range(rounds + 1):
            for way in rotated(WAYS, turn):
                cut = case if way != "plain, one batch per rank" else replace(case, micro_batch=None)
                experiment = experiment_of(cut, WAYS[way])
                answer = trainer_turn(experiment, case.steps, layout, case.build_model(), splits, collectives)
                if turn:
                    seconds[way].append(answer)
    if rank == 0:
        results.put(seconds)


def measure(case: Case, world_size: int, rounds: int) -> dict[str, Any]:
    """Seconds per step of every way, and exact's ratios; printed."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        context.Process(target=_rank, args=(rank, world_size, port, case, rounds, results), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError(f"a rank failed: exit codes {[process.exitcode for process in processes]}")
    seconds: dict[str, list[Seconds]] = results.get()
    row: dict[str, Any] = {"world_size": world_size, "turns": seconds, "exact_ratio": {}}
    for way in list(WAYS)[1:]:
        pair = {way: seconds[way], "exact": seconds["exact"]}
        wall, processor = summary(pair)["exact"], summary(pair, "cpu")["exact"]
        target = TARGETS.get((way, world_size))
        row["exact_ratio"][way] = {"wall": wall, "processor": processor, "target": target}
        print(
            f"{world_size:10}   {1e-3 * wall['microseconds']:8.1f} ms   to {way:26} {wall['ratio']:6.3f} "
            f"({wall['low']:.3f} to {wall['high']:.3f})   {wall['fastest']:7.3f}   {processor['ratio']:9.3f}   "
            f"{f'target {target}' if target else ''}"
        )
    return row


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="one round of one step; recorded with --json only")
    parser.add_argument("--json", type=Path, help="where to record the results (default: benchmarks/results)")
    arguments = parser.parse_args()
    batch, micro_batch = (4, 2) if arguments.quick else (arguments.batch, arguments.micro_batch)
    steps, rounds = (1, 1) if arguments.quick else (arguments.steps, arguments.rounds)
    case = Case("ResNet-18, 32x32", "resnet18", (3, 32, 32), batch, steps, False, micro_batch)
    print(
        f"ResNet-18, 32x32, global batch {batch} in micro-batches of {micro_batch}; medians of {rounds} rounds in turns"
    )
    print(f"world_size   exact, a step   {'ratio (quartiles)':>53}   fastest   processor")
    results = [measure(case, world_size, rounds) for world_size in arguments.worlds]
    if arguments.json or not arguments.quick:
        command = f"python -m benchmarks.exact_end_to_end --batch {batch} --micro-batch {micro_batch}"
        print(record("exact_end_to_end", command, results, arguments.json, rounds))


if __name__ == "__main__":
    main()

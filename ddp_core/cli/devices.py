"""Which devices a run takes: the GPUs of this node, or its CPU.

`auto` takes GPUs where there is one for each replica or rank that was asked for, and else the CPU. `cuda` takes GPUs
in any case, and shares them where there are too few. Under a launcher such as SLURM's, which may show each rank a GPU
of its own, one visible GPU is enough: ranks compare their GPUs when they meet (`agreed_backend`).
"""

from __future__ import annotations

import sys

from ddp_core.base.cuda_driver import gpus_here
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.config.layout import DeviceType, Layout, LayoutKind
from ddp_core.config.options import Asked
from ddp_core.config.records import ReductionKind
from ddp_core.distributed.world import World


def choose_layout(asked: Asked, world: World) -> Layout:
    """The layout; where the user left something open, the launcher decides, if there is one, and the devices here."""
    found = 0 if asked.device == "cpu" else gpus_here()
    # A launcher counts processes; the replicas of dp are threads of one process, which it knows nothing of.
    if World.is_set() and (asked.layout != "dp" or world.world_size > 1):
        nnodes, wanted, needed = world.nnodes, world.nproc_per_node, 1
        if asked.nproc_per_node not in (None, wanted):
            raise UserError(
                f"--nproc-per-node {asked.nproc_per_node}, but this process is {world.place} of a launch with {wanted} "
                "on each node: leave the option out, or unset RANK and WORLD_SIZE where no launcher has set them"
            )
    else:
        nnodes, wanted = asked.nnodes.high, asked.nproc_per_node or 0
        needed = wanted or 1
    device: DeviceType = ("cuda" if found >= needed else "cpu") if asked.device == "auto" else asked.device
    layout = Layout(
        kind=asked.layout,
        device=device,
        nnodes=nnodes,
        nproc_per_node=wanted or _usual_count(asked.layout, device, found),
        shard=asked.shard,
        dealt=asked.shares if asked.shares in (None, "auto") else tuple(map(int, asked.shares.split(","))),
    )
    layout.check()
    if layout.dealt and asked.nnodes.low != asked.nnodes.high:
        raise UserError(f"--shares is for ranks that stay the same, not for --nnodes {asked.nnodes}: leave one out")
    if found and device == "cpu":
        say_once(world, f"on the CPU: {_counted(layout)}, but {_gpus(found)} here; with --device cuda they share it")
    return layout


def check_gpus(layout: Layout, reduction: ReductionKind, backend: str, world: World) -> None:
    """Print a line where replicas share GPUs. Raises UserError (4) where there are too few GPUs to run at all."""
    if layout.device == "cpu":
        return
    found, count = gpus_here(), layout.nproc_per_node
    is_launched_outside = layout.kind == "ddp" and World.is_set()
    if found >= count or (found and is_launched_outside):
        return
    if not found:
        raise UserError(
            f"asked for {count} CUDA device{'s' if count > 1 else ''}, found 0; what would run here: {_on_cpu(layout)}",
            ExitCode.RESOURCES,
        )
    few, one_each = f"{_counted(layout)}, but {_gpus(found)} here", f"--nproc-per-node {found}"
    if layout.kind == "dp" and reduction == "plain":
        raise UserError(
            f"{few}: nn.DataParallel, the plain reduction of dp, needs a GPU for each replica; what would run here: "
            f"{one_each}, or --reduction exact, with which replicas share a GPU, or {_on_cpu(layout)}",
            ExitCode.RESOURCES,
        )
    if layout.kind == "ddp" and backend == "nccl":
        raise UserError(
            f"{few}: nccl needs a GPU for each rank; what would run here: {one_each}, or --backend gloo, with which "
            f"ranks share a GPU, or {_on_cpu(layout)}",
            ExitCode.RESOURCES,
        )
    if layout.kind == "dp":
        say_once(world, f"{few}: they are shared, which is no faster than {one_each}")


def say_once(world: World, line: str) -> None:
    """Print a line about a decision, once: on rank 0."""
    if world.is_first:
        print(line, file=sys.stderr)


def _usual_count(kind: LayoutKind, device: DeviceType, found: int) -> int:
    if kind == "single":
        return 1
    return max(found, 1) if device == "cuda" else 2


def _counted(layout: Layout) -> str:
    what = "rank" if layout.kind == "ddp" else "replica"
    return f"{layout.nproc_per_node} {what}{'s' if layout.nproc_per_node > 1 else ''}"


def _gpus(found: int) -> str:
    return "1 GPU is" if found == 1 else f"{found} GPUs are"


def _on_cpu(layout: Layout) -> str:
    count = layout.nproc_per_node
    return f"--layout {layout.kind} --device cpu" + (f" --nproc-per-node {count}" if count > 1 else "")

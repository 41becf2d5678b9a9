"""What is here and what would run: versions, devices, memory, the container engine's shared memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.refusals import human_bytes
from ddp_core.distributed.world import World, node_here

_RANKS = (2, 4, 8)
"""Numbers of ranks for which the memory of a rank is told."""


def diagnose(experiment: str | None, settings: Sequence[str], data_dir: Path, as_json: bool = False) -> int:
    """Print what is here and, for an experiment, the memory that it needs; returns 0, whatever it finds."""
    found = _machine()
    if experiment is not None:
        found["memory"] = _memory(experiment, settings, data_dir)
    if as_json:
        print(json.dumps(found, indent=1))
        return ExitCode.DONE
    _describe_machine(found)
    if experiment is not None:
        _describe_memory(found["memory"])
    return ExitCode.DONE


def _machine() -> dict[str, Any]:
    """The facts that decide which layouts run here, in plain JSON types and bytes."""
    import torch

    from ddp_core.base.cuda_driver import gpus_here
    from ddp_core.record.environment import describe_environment

    facts, count, shared = describe_environment(), gpus_here(), Path("/dev/shm")
    return {name: facts[name] for name in ("python", "packages", "cpu", "cores", "memory_bytes")} | {
        "cuda_devices": [torch.cuda.get_device_name(number) for number in range(count)],
        "shared_memory_bytes": shutil.disk_usage(shared).total if shared.exists() else None,
        "launcher": _launcher(),
        "runs_here": _commands(count),
    }


def _launcher() -> str | None:
    """Which rank or node a launcher made of this process, and what `ddp train` would do; None without a launcher."""
    from ddp_core.cli.launched import follow_launcher
    from ddp_core.config.options import Asked

    try:
        world, node = World.from_environment(), node_here()
        asked, is_host = follow_launcher(Asked(experiment="digits"), world, node)
    except UserError as error:
        return f"`ddp train` would not start: {error}"
    if world.world_size > 1:
        return f"this is {world.place} of {world.world_size}; `ddp train` trains as this rank and starts no other"
    if node is None:
        return None
    count = "" if asked.nproc_per_node is None else f"{asked.nproc_per_node} "
    where = f"{asked.rdzv_endpoint}{' (here)' if is_host else ''}"
    return f"this is {node.description}; `ddp train` starts the {count}ranks of this node; the nodes meet at {where}"


def _describe_machine(found: dict[str, Any]) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in found["packages"].items() if version)
    print(f"python {found['python']}, {versions}")
    print(f"cpu     {found['cpu']}, {found['cores']} cores, {human_bytes(found['memory_bytes'])} memory")
    devices = found["cuda_devices"]
    print(f"cuda    {len(devices)} devices" + "".join(f"; {name}" for name in devices))
    if (shared := found["shared_memory_bytes"]) is not None:
        print(f"shm     {human_bytes(shared)} of shared memory (loader processes want 512 MB)")
    if found["launcher"] is not None:
        print(f"launch  {found['launcher']}")
    print("runs here:")
    for line in found["runs_here"]:
        print(f"  {line}")


def _memory(name: str, settings: Sequence[str], data_dir: Path) -> dict[str, Any]:
    """What one replica, and a rank of several, needs at least, and whether that fits the devices here."""
    import psutil
    import torch

    from ddp_core.base.cuda_driver import gpus_here
    from ddp_core.cli.prepare import load_with_settings
    from ddp_core.config.layout import SHARD_MODES
    from ddp_core.experiment.request import build_parts
    from ddp_core.run.memory import standing_memory
    from ddp_core.sharding import Sharding

    loaded = load_with_settings(name, settings)
    experiment, model = loaded.experiment, build_parts(loaded, data_dir).model
    parts = standing_memory(model, experiment, Sharding(), 1)
    least = sum(parts.values())
    rooms = {"cpu": psutil.virtual_memory().available}
    rooms |= {f"cuda:{number}": torch.cuda.get_device_properties(number).total_memory for number in range(gpus_here())}
    return {
        "experiment": experiment.name,
        "parts": parts,
        "least": least,
        "ranks": {
            str(ranks): {
                mode: sum(standing_memory(model, experiment, Sharding(mode), ranks).values())
                for mode in ("none", *SHARD_MODES)
            }
            for ranks in _RANKS
        },
        "devices": {device: {"room": room, "verdict": _fits(least, room)} for device, room in rooms.items()},
    }


def _describe_memory(memory: dict[str, Any]) -> None:
    print(f"memory  {memory['experiment']}, one replica; activations, which only a training can show, come on top:")
    for part, size in [*memory["parts"].items(), ("at least", memory["least"])]:
        print(f"  {part:16} {human_bytes(size)}")
    for count, least in memory["ranks"].items():
        modes = ", ".join(f"{mode} {human_bytes(size)}" for mode, size in least.items())
        print(f"  each of {count} ranks, by what is sharded: {modes}")
    for device, there in memory["devices"].items():
        print(f"  {device}: {there['verdict']}")


def _fits(least: int, room: int) -> str:
    """Whether this much fits a device with `room` bytes; if not, what to do."""
    if least <= room:
        return f"has {human_bytes(room)}, of which a replica leaves {human_bytes(room - least)} for activations"
    return f"has {human_bytes(room)}, in which a replica does not fit: cut it with --shard, or the model itself"


def _commands(devices: int) -> list[str]:
    """Commands that run on a machine with this number of GPUs."""
    lines = ["ddp train digits --device cpu"]
    lines += [f"ddp train digits --device cpu --layout {kind} --nproc-per-node 2" for kind in ("dp", "ddp")]
    if devices:
        lines.append("ddp train digits --device cuda")
        # On a single GPU, both replicas or ranks share it.
        count = max(devices, 2)
        lines += [f"ddp train digits --device cuda --layout {kind} --nproc-per-node {count}" for kind in ("dp", "ddp")]
    return lines

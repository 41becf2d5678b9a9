"""What is here and what would run: versions, devices, memory, the container engine's shared memory."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_core.errors import ExitCode

if TYPE_CHECKING:
    from ddp_core.commands.memory import MemoryEstimate

_WATCHED_SAMPLES = 8
"""Enough for batch norm, few enough for any machine; the estimate is then scaled to the real micro-batch."""


def doctor(experiment: str | None = None, settings: Sequence[str] = (), data_dir: Path = Path("data")) -> int:
    """Print what is here and, for an experiment, the memory that it needs; returns 0: a diagnosis is not a failure."""
    _describe_machine()
    if experiment is not None:
        _describe_memory(experiment, settings, data_dir)
    return ExitCode.DONE


def _describe_machine() -> None:
    """Print the facts that decide which layouts run here."""
    import torch

    from ddp_core.run.environment import describe_environment

    facts = describe_environment()
    versions = ", ".join(f"{name} {version}" for name, version in facts["packages"].items() if version)
    print(f"python {facts['python']}, {versions}")
    print(f"cpu     {facts['cpu']}, {facts['cores']} cores, {facts['memory_bytes'] / 2**30:.1f} GiB memory")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    print(f"cuda    {count} devices" + "".join(f"; {torch.cuda.get_device_name(number)}" for number in range(count)))
    shared = Path("/dev/shm")
    if shared.exists():
        print(f"shm     {shutil.disk_usage(shared).total / 2**20:.0f} MiB of shared memory (loader processes want 512)")
    print("runs here:")
    for line in _commands(count):
        print(f"  {line}")


def _describe_memory(name: str, settings: Sequence[str], data_dir: Path) -> None:
    """Print the memory that one replica takes, from one watched micro-batch on CPU, and what each device has."""
    import numpy as np
    import psutil
    import torch

    from ddp_core.commands.memory import estimate_memory
    from ddp_core.data.loader import Loader
    from ddp_core.run.hooks import optimizer_of
    from ddp_core.run.prepare import load_with_settings
    from ddp_core.run.request import build_parts
    from ddp_core.spec.experiment import Optimizer

    loaded = load_with_settings(name, settings)
    experiment, parts = loaded.experiment, build_parts(loaded, data_dir)
    samples = experiment.micro_batch or experiment.global_batch_size
    ids = np.arange(min(samples, _WATCHED_SAMPLES, len(parts.splits.train)), dtype=np.int64)
    inputs, targets = Loader(parts.splits.train, collate=parts.splits.collate).fetch(0, ids)
    growth = samples / len(ids)
    chosen = experiment.optimizer
    optimizer = chosen if isinstance(chosen, Optimizer) else partial(optimizer_of, loaded)
    averaged = experiment.ema_decay is not None
    estimate = estimate_memory(parts.model, parts.loss, optimizer, inputs, targets, growth, averaged=averaged)
    print(f"memory  {experiment.name}, one replica, micro-batches of {samples} samples, float32 (estimated):")
    for part, size in [*estimate.table(), ("peak", estimate.peak)]:
        print(f"  {part:16} {_bytes(size)}")
    print(f"  DistributedDataParallel keeps gradient buckets beside these: {_bytes(estimate.gradients)}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    rooms = {"cpu": psutil.virtual_memory().available}
    rooms |= {f"cuda:{number}": torch.cuda.get_device_properties(number).total_memory for number in range(count)}
    for device, room in rooms.items():
        print(f"  {device}: {_fits(estimate, samples, room)}")


def _fits(estimate: MemoryEstimate, samples: int, room: int) -> str:
    """Which kind of parallelism a replica of this size calls for on a device with `room` bytes."""
    has = f"has {_bytes(room)}"
    if estimate.peak <= room:
        return f"{has}: a replica fits, so data parallelism will do"
    fixed = estimate.weights + estimate.optimizer_state + estimate.in_update
    if fixed > room:
        return f"{has}: not even the weights, gradients and optimizer state fit, which calls for model parallelism"
    return f"{has}: micro-batches of {samples} do not fit; use smaller ones (--set micro_batch=N)"


def _bytes(size: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size / 2**10:.1f} KiB"


def _commands(devices: int) -> list[str]:
    lines = ["ddp train digits --device cpu"]
    lines += [f"ddp train digits --device cpu --layout {kind} --nproc-per-node 2" for kind in ("dp", "ddp")]
    if devices:
        lines.append("ddp train digits --device cuda")
    if devices > 1:
        lines.append(f"ddp train digits --device cuda --layout ddp --nproc-per-node {devices}")
    return lines

"""The devices that are played: how many, how large, what is allocated on them, and where each thread works."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import _disable_current_modes

NAME = "stand-in for CUDA (a CPU)"
"""The name of each device: in a record it says that no GPU was there."""


@dataclass
class Memory:
    """Bytes on one device."""

    now: int = 0
    peak: int = 0


class Here(threading.local):
    """What belongs to one thread."""

    device = 0
    is_watched = False
    """Whether the thread's operations are watched."""
    recording: Any = None
    """The graph that is being recorded."""
    factory: torch.device | None = None
    """Where tensors belong that C++ makes from nothing."""

    def __init__(self) -> None:
        self.streams: dict[int, Any] = {}


@dataclass
class World:
    """The one machine that is played."""

    count: int = 1
    bytes_each: int = 16 * 2**30
    memory: list[Memory] = field(default_factory=list)
    sync_debug: int = 0
    has_driver: bool = False
    """Whether the driver is started, which no fork survives."""
    is_bad_fork: bool = False
    executed: Counter[str] = field(default_factory=Counter)
    """How often each operation ran on a device."""
    issued: int = 0
    """How many copies to the host have been queued."""
    later: list[tuple[int, Any, Any]] = field(default_factory=list)
    """Copies to the host that the device has not made yet: number, destination, values."""
    waits_for_peer: bool = False
    """Whether the devices wait for a message of a peer that is gone: see lost_peers."""
    aborts: int = 0
    """How often the process has aborted its groups."""
    here: Here = field(default_factory=Here)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def begin(self, count: int, bytes_each: int | None = None) -> None:
        self.count, self.bytes_each = count, bytes_each or self.bytes_each
        self.memory = [Memory() for _ in range(count)]

    def start_driver(self) -> None:
        """Raises RuntimeError in a fork of a process that has started it."""
        self.refuse_bad_fork()
        self.has_driver = True

    def refuse_bad_fork(self) -> None:
        if self.is_bad_fork:
            raise RuntimeError(
                "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
                "'spawn' start method"
            )

    def forked(self) -> None:
        """In the child of a fork."""
        self.is_bad_fork = self.is_bad_fork or self.has_driver
        self.lock = threading.RLock()

    def allocate(self, device: int, size: int) -> None:
        """Raises OutOfMemoryError where the device is full."""
        with self.lock:
            memory = self.memory[device]
            if memory.now + size > self.bytes_each:
                self.refuse_memory(device, size)
            memory.now += size
            memory.peak = max(memory.peak, memory.now)

    def refuse_memory(self, device: int, size: int) -> NoReturn:
        """Raises OutOfMemoryError."""
        left = self.bytes_each - self.memory[device].now
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {size} bytes. GPU {device} has a total capacity of "
            f"{self.bytes_each} bytes of which {left} bytes is free."
        )

    def queue_copy(self, destination: torch.Tensor) -> None:
        """What was copied to the host lies there once somebody has waited for it; until then there is rubbish."""
        if self.here.recording is None and not destination.is_sparse:
            plain = destination.detach()
            with self.lock, _disable_current_modes():
                self.issued += 1
                self.later.append((self.issued, plain, plain.clone()))
                plain.data.fill_(torch.nan if plain.is_floating_point() else 1)

    def refuse_while_recording(self) -> None:
        """Raises AcceleratorError, and no recording of a graph succeeds in which this was called."""
        if self.here.recording is not None:
            self.here.recording.spoil()
            raise torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")

    def refuse_endless_wait(self) -> None:
        """Raises RuntimeError where the host would wait for ever, since the device waits for a peer that is gone."""
        if self.waits_for_peer:
            raise RuntimeError("the host waits for a device that waits for ever: NCCL's peer is gone")

    def deliver(self, up_to: int | None = None) -> None:
        """Somebody has waited for the device, or for its first copies to the host."""
        self.refuse_endless_wait()
        with self.lock:
            due = [each for each in self.later if up_to is None or each[0] <= up_to]
            self.later = [each for each in self.later if up_to is not None and each[0] > up_to]
            with _disable_current_modes():
                for _, destination, values in due:
                    destination.data.copy_(values)

    def free(self, device: int, size: int) -> None:
        with self.lock:
            self.memory[device].now -= size


WORLD = World()


def resolved(device: Any) -> torch.device:
    """The device with its index; "cuda" alone is this thread's. Raises AcceleratorError where there is no such one."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if device.type != "cuda":
        return torch.device(device)
    index = WORLD.here.device if device.index is None else device.index
    if index >= WORLD.count:
        raise torch.AcceleratorError("CUDA error: invalid device ordinal")
    return torch.device("cuda", index)


def waits(what: str) -> None:
    """Say that the host waits for the device here. Raises RuntimeError where that is an error, or ends a recording."""
    WORLD.refuse_while_recording()
    WORLD.deliver()
    if WORLD.sync_debug == 2:
        raise RuntimeError(f"called a synchronizing CUDA operation ({what})")
    if WORLD.sync_debug == 1:
        import warnings

        warnings.warn(f"called a synchronizing CUDA operation ({what})", stacklevel=3)

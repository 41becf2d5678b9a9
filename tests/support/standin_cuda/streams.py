"""Streams and events: each thread has a current stream for each device; the work is done at once, in program order."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

from tests.support.standin_cuda.world import WORLD, resolved

_numbers = itertools.count(1)


class Stream:
    """As torch.cuda.Stream."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        torch.cuda._lazy_init()
        self.device = resolved("cuda" if device is None else device)
        self.priority = priority
        self.stream_id = self.cuda_stream = next(_numbers)
        self._context = StreamContext(self)

    def __enter__(self) -> None:
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    @property
    def device_index(self) -> int:
        return self.device.index

    @property
    def is_default(self) -> bool:
        return self.stream_id == 0

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        synchronize()

    def is_capturing(self) -> bool:
        return WORLD.here.recording is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.device, self.stream_id) == (other.device, other.stream_id)

    def __hash__(self) -> int:
        return hash((self.device, self.stream_id))


class Event:
    """As torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any):
        self._is_timed = enable_timing
        self._time: float | None = None
        self._was_asked, self._copies, self._waits = True, 0, False
        self.device: torch.device | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        if self.device is not None and self.device != stream.device:
            raise RuntimeError(f"Event device {self.device} does not match recording stream's device {stream.device}.")
        self.device, self._time, self._copies = stream.device, time.perf_counter(), WORLD.issued
        self._waits = WORLD.waits_for_peer
        self._was_asked = False

    def wait(self, stream: Stream | None = None) -> None:
        assert stream is None or isinstance(stream, Stream)

    def query(self) -> bool:
        """Whether the device has come so far: not where one asks for the first time."""
        WORLD.refuse_while_recording()
        if self._waits and WORLD.waits_for_peer:
            return False
        before, self._was_asked = self._was_asked, True
        if before:
            WORLD.deliver(self._copies)
        return before

    def synchronize(self) -> None:
        WORLD.refuse_while_recording()
        self._was_asked = True
        WORLD.deliver(self._copies)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds. Raises ValueError or RuntimeError where one of the two has no time."""
        if not self._is_timed or not end._is_timed:
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._time is None or end._time is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if self.device != end.device:
            raise ValueError("Both events must be on the same device.")
        return 1000 * (end._time - self._time)


class StreamContext:
    """As torch.cuda.stream; None changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self._before: list[tuple[int, Stream]] = []

    def __enter__(self) -> None:
        if self.stream is not None:
            device = self.stream.device.index
            self._before.append((WORLD.here.device, current_stream(device)))
            set_stream(self.stream)

    def __exit__(self, *error: Any) -> None:
        if self.stream is not None:
            device, stream = self._before.pop()
            set_stream(stream)
            WORLD.here.device = device


def stream(stream: Stream | None) -> StreamContext:
    return StreamContext(stream)


def set_stream(stream: Stream | None) -> None:
    if stream is not None:
        WORLD.here.device = stream.device.index
        WORLD.here.streams[stream.device.index] = stream


def default_stream(device: Any = None) -> Stream:
    made = Stream(device)
    made.stream_id = made.cuda_stream = 0
    return made


def current_stream(device: Any = None) -> Stream:
    torch.cuda._lazy_init()
    found = resolved("cuda" if device is None else device)
    return WORLD.here.streams.get(found.index) or default_stream(found)


def synchronize(*_: Any) -> None:
    """Wait for all that was queued."""
    WORLD.refuse_while_recording()
    WORLD.deliver()

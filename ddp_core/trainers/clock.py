"""Where the seconds of a step go: laps of a stopwatch, by the host's clock, or on CUDA by events on the device."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ddp_core.observe.step import StepBatch, StepObserver, StepReport

PARTS = ("data", "forward", "backward", "forward_backward", "exposed_communication", "optimizer", "checkpoint", "other")


class StepClock(StepObserver):
    """Adds up laps. A lap costs about 0.2 microseconds, on CUDA a few.

    On CUDA the host only launches kernels, and runs ahead of them. So the moments there are events, which the device
    records when it comes to them; their times are read later, of steps that are over, and nothing waits for the device.
    Not run on a GPU yet.

    Communication that runs while backward computes takes no time of its own. Exposed communication begins when the last
    gradient is done. The model's first parameter is the last to get a gradient, so a hook on that parameter marks the
    moment. Without a `model` there is no hook, and no moment is marked. The replicas of `dp` run forward and backward
    in threads; both count together as `forward_backward`.
    """

    def __init__(self, model: nn.Module | None, device: torch.device | None = None) -> None:
        self._stopwatch = _DeviceStopwatch(device) if device is not None and device.type == "cuda" else _HostStopwatch()
        self.seconds_aside = 0.0
        """Seconds of the host's clock spent in blocks of `aside`."""
        self._steps = 0
        self._is_marked = False
        parameters = model.parameters() if model is not None else ()
        first = next((parameter for parameter in parameters if parameter.requires_grad), None)
        if first is not None:
            first.register_post_accumulate_grad_hook(self._mark)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by part; on CUDA, those that the device is done with."""
        return self._stopwatch.seconds

    def before_step(self, batch: StepBatch) -> None:
        self._stopwatch.lap("other", waited=batch.wait_seconds)

    def gradients_done(self, batch: StepBatch, reports: Sequence[StepReport]) -> None:
        self.lap("exposed_communication")

    def after_step(self, batch: StepBatch) -> None:
        self.lap("optimizer")
        self._steps += 1
        self._stopwatch.settle()

    def lap(self, part: str) -> None:
        """Count the time since the last lap as `part`."""
        self._stopwatch.lap(part)

    def lap_backward(self) -> None:
        """Count the time since the last lap as backward; after the last gradient, as exposed communication."""
        if self._is_marked:
            self._is_marked = False
            self._stopwatch.lap_marked("backward", "exposed_communication")
        else:
            self.lap("backward")

    @contextlib.contextmanager
    def aside(self, part: str | None = None) -> Iterator[None]:
        """Keep the time of this block apart from training: count it as `part`, or not at all where `part` is None."""
        self.lap("other")
        began = time.perf_counter()
        try:
            yield
        finally:
            if part is None:
                self.restart()
            else:
                self.lap(part)
            self.seconds_aside += time.perf_counter() - began

    def restart(self) -> None:
        """Do not count the time since the last lap."""
        self._stopwatch.restart()

    def per_step(self) -> dict[str, float]:
        """Seconds per step, by part; empty before the first step has ended. On CUDA this waits for the device."""
        self._stopwatch.settle(wait=True)
        return {part: seconds / self._steps for part, seconds in self.seconds.items()} if self._steps else {}

    def _mark(self, _: Tensor) -> None:
        self._stopwatch.mark()
        self._is_marked = True


class _HostStopwatch:
    """Laps by the host's clock."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._last = self._marked = self._now()

    def lap(self, part: str, waited: float = 0.0) -> None:
        """Count the time since the last lap as `part`; the `waited` seconds of it, or as many as there are, as data."""
        now = self._now()
        self._count(part, self._last, now, waited)
        self._last = now

    def mark(self) -> None:
        """Remember this moment within a lap."""
        self._marked = self._now()

    def lap_marked(self, before: str, after: str) -> None:
        """Count the time since the last lap, up to the mark as `before`, and from there as `after`."""
        now = self._now()
        self._count(before, self._last, self._marked)
        self._count(after, self._marked, now)
        self._last = now

    def restart(self) -> None:
        """Do not count the time since the last lap."""
        self._last = self._now()

    def settle(self, wait: bool = False) -> None:
        """Add up laps that are not counted yet and are over; with `wait`, all."""

    def _now(self) -> Any:
        return time.perf_counter()

    def _count(self, part: str, began: Any, ended: Any, waited: float = 0.0) -> None:
        self._add(part, ended - began, waited)

    def _add(self, part: str, seconds: float, waited: float) -> None:
        waited = min(waited, seconds)
        self.seconds[part] += seconds - waited
        self.seconds["data"] += waited


class _DeviceStopwatch(_HostStopwatch):
    """Laps between events of a CUDA device. What the host waited for is data only where the device stood still, too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._laps: deque[tuple[str, torch.cuda.Event, torch.cuda.Event, float]] = deque()
        super().__init__()

    def settle(self, wait: bool = False) -> None:
        if wait and self._laps:
            self._laps[-1][2].synchronize()
        while self._laps and self._laps[0][2].query():
            part, began, ended, waited = self._laps.popleft()
            self._add(part, began.elapsed_time(ended) / 1000, waited)

    def _now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _count(self, part: str, began: Any, ended: Any, waited: float = 0.0) -> None:
        self._laps.append((part, began, ended, waited))

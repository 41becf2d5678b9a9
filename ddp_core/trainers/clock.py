"""Where the seconds of a step go, part by part: by the host's clock, or on CUDA by events on the device."""

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
    """Divides the time of training into laps, and adds up the laps of each part.

    A lap costs about 0.2 microseconds, on CUDA a few.

    On CUDA the host only launches kernels, and runs ahead of them. So a lap there begins and ends with an event, which
    the device records when it comes to it; its time is read after a later step, and nothing waits for the device.

    Communication that runs while backward computes takes no time of its own. Exposed communication begins when the last
    gradient is done. The model's first parameter is the last to get a gradient, so a hook on that parameter notes the
    time. Without a `model` there is no hook. The replicas of `dp` run forward and backward in threads; both count
    together as `forward_backward`.
    """

    def __init__(self, model: nn.Module | None, device: torch.device | None = None) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self._seconds = dict.fromkeys(PARTS, 0.0)
        # On CUDA, laps that are not added up yet: part, begin, end, and the seconds in which the host waited for data.
        self._laps: deque[tuple[str, Any, Any, float]] = deque()
        self.seconds_aside = 0.0
        """Seconds of the host's clock spent in blocks of `aside`."""
        self._steps = 0
        self._lap_began = self._now()
        self._last_gradient: Any = None
        parameters = model.parameters() if model is not None else ()
        first = next((parameter for parameter in parameters if parameter.requires_grad), None)
        if first is not None:
            first.register_post_accumulate_grad_hook(self._note_last_gradient)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by part; on CUDA, those that the device is done with."""
        self._add_up()
        return self._seconds

    def before_step(self, batch: StepBatch) -> None:
        self.lap("other", waited=batch.wait_seconds)

    def gradients_done(self, batch: StepBatch, reports: Sequence[StepReport]) -> None:
        self.lap("exposed_communication")

    def after_step(self, batch: StepBatch) -> None:
        self.lap("optimizer")
        self._steps += 1
        self._add_up()

    def lap(self, part: str, waited: float = 0.0, ended: Any = None) -> None:
        """Count the time since the last lap, until `ended` or now, as `part`; `waited` seconds of it as data.

        A lap may be shorter than `waited`: on CUDA it is data only as far as the device stood still, too.
        """
        ended = self._now() if ended is None else ended
        if self._device is None:
            self._count(part, ended - self._lap_began, waited)
        else:
            self._laps.append((part, self._lap_began, ended, waited))
        self._lap_began = ended

    def lap_backward(self) -> None:
        """Count the time since the last lap as backward; after the last gradient, as exposed communication."""
        if self._last_gradient is None:
            self.lap("backward")
        else:
            self.lap("backward", ended=self._last_gradient)
            self._last_gradient = None
            self.lap("exposed_communication")

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
        self._lap_began = self._now()

    def per_step(self) -> dict[str, float]:
        """Seconds per step, by part; empty before the first step has ended. On CUDA this waits for the device."""
        if self._device is not None and self._laps:
            self._laps[-1][2].synchronize()
        return {part: seconds / self._steps for part, seconds in self.seconds.items()} if self._steps else {}

    def _note_last_gradient(self, _: Tensor) -> None:
        self._last_gradient = self._now()

    def _now(self) -> Any:
        """The host's time in seconds, or an event that is put on the device's stream."""
        if self._device is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _count(self, part: str, seconds: float, waited: float) -> None:
        waited = min(waited, seconds)
        self._seconds[part] += seconds - waited
        self._seconds["data"] += waited

    def _add_up(self) -> None:
        """Add up the laps that the device has ended; those of the host's clock are counted at once."""
        while self._laps and self._laps[0][2].query():
            part, began, ended, waited = self._laps.popleft()
            self._count(part, began.elapsed_time(ended) / 1000, waited)

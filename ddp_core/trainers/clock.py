"""Where the seconds of a step go: laps of a stopwatch on the host, which do not tell how long kernels run on CUDA."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from ddp_core.observe.step import StepBatch, StepObserver, StepReport

PARTS = ("data", "forward", "backward", "forward_backward", "exposed_communication", "optimizer", "checkpoint", "other")


class StepClock(StepObserver):
    """Adds up laps. A lap costs about 0.2 microseconds.

    Communication that runs while backward computes takes no time of its own. Exposed communication begins when the last
    gradient is done. The model's first parameter is the last to get a gradient, so a hook on that parameter marks the
    moment. Without a `model` there is no hook, and no moment is marked. The replicas of `dp` run forward and backward
    in threads; both count together as `forward_backward`.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.seconds_aside = 0.0
        """Seconds spent in blocks of `aside`."""
        self._steps = 0
        self._last = time.perf_counter()
        self._gradients_done: float | None = None
        parameters = model.parameters() if model is not None else ()
        first = next((parameter for parameter in parameters if parameter.requires_grad), None)
        if first is not None:
            first.register_post_accumulate_grad_hook(self._mark)

    def before_step(self, batch: StepBatch) -> None:
        self.lap("other")
        self.seconds["other"] -= batch.wait_seconds
        self.seconds["data"] += batch.wait_seconds

    def gradients_done(self, batch: StepBatch, reports: Sequence[StepReport]) -> None:
        self.lap("exposed_communication")

    def after_step(self, batch: StepBatch) -> None:
        self.lap("optimizer")
        self._steps += 1

    def lap(self, part: str) -> None:
        """Count the time since the last lap as `part`."""
        now = time.perf_counter()
        self.seconds[part] += now - self._last
        self._last = now

    def lap_backward(self) -> None:
        """Count the time since the last lap as backward; after the last gradient, as exposed communication."""
        if self._gradients_done is not None:
            exposed = time.perf_counter() - self._gradients_done
            self._last += exposed
            self.seconds["exposed_communication"] += exposed
            self._gradients_done = None
        self.lap("backward")

    @contextlib.contextmanager
    def aside(self, part: str | None = None) -> Iterator[None]:
        """Keep the time of this block apart from training: count it as `part`, or not at all where `part` is None."""
        self.lap("other")
        began = self._last
        try:
            yield
        finally:
            if part is None:
                self.restart()
            else:
                self.lap(part)
            self.seconds_aside += self._last - began

    def restart(self) -> None:
        """Do not count the time since the last lap."""
        self._last = time.perf_counter()

    def per_step(self) -> dict[str, float]:
        """Seconds per step, by part; empty before the first step has ended."""
        return {part: seconds / self._steps for part, seconds in self.seconds.items()} if self._steps else {}

    def _mark(self, _: Tensor) -> None:
        self._gradients_done = time.perf_counter()

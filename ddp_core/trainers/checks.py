"""The guard of a run: what its ranks compare while they train, and what follows from what is found.

Every rank updates its own copy of weights, buffers, averages and optimizer state, from the same gradients. A callback
that changes them on one rank alone, or memory that loses a bit, would else be seen only when training has ended, after
checkpoints of it were written. Whether what all ranks have is right, a rehearsal and a witness tell.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ddp_core.base.digests import fast_digest, first_difference
from ddp_core.base.errors import ExitCode
from ddp_core.distributed.process_group import Collectives
from ddp_core.observe.step import StepBatch, StepObserver
from ddp_core.trainers.clock import StepClock
from ddp_core.trainers.job import Finding, Job
from ddp_core.trainers.noting import group_numbers
from ddp_core.trainers.saving import Saving
from ddp_core.trainers.train_state import TrainState


class Guard(StepObserver):
    """Ends a run where one of its checks finds other bits, or with `--on-difference warn` marks its record once.

    All ranks make the same checks in the same steps and meet the same findings: each raises Finding on every rank.
    Only a run with the exact reduction promises anything.
    """

    def __init__(self, job: Job, state: TrainState, clock: StepClock, saving: Saving) -> None:
        self._job, self._state, self._clock, self._saving = job, state, clock, saving
        self.mode = self._job.options.guard if self._job.is_exact else "off"
        self.is_broken = False
        """Whether a check has found something in a run that shall go on all the same; then nothing more is checked."""
        self.figures: dict[str, Any] = {"mode": self.mode, "seconds": {}}
        """What run.json keeps of the guard, in `attempts`: among them the seconds of each kind of check."""
        self._memory = DeviceMemory(job.collectives) if job.device.type == "cuda" else None
        self._began_at = 0

    @property
    def checks(self) -> bool:
        """Whether anything is still to be checked."""
        return self.mode != "off" and not self.is_broken

    def begin(self) -> None:
        self._began_at = self._state.step

    @contextlib.contextmanager
    def check(self, kind: str, step: int) -> Iterator[None]:
        """Make one check inside, after `step` steps, which raises Finding on every rank for what it finds.

        `kind` names it in the figures. Any other error, such as a lost peer or one of a callback's state on one rank
        alone, ends the run, whatever was asked for.
        """
        try:
            with self.timed(kind):
                yield
        except Finding as error:
            if self._job.options.on_difference == "stop":
                raise
            self.is_broken = True
            self._job.console.say(f"warning: {error}; the run goes on as asked, and its record says so")
            if self._job.run.mark_broken is not None:
                self._job.run.mark_broken(step, str(error))

    @contextlib.contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Count the time of a block to the checks of this kind, and not to the steps."""
        began = time.perf_counter()
        try:
            with self._clock.aside("other"):
                yield
        finally:
            seconds = self.figures["seconds"]
            seconds[kind] = seconds.get(kind, 0.0) + time.perf_counter() - began

    def settle(self, batch: StepBatch) -> None:
        step = self._state.step
        if self.checks and (batch.stops or self.compares_after(step)):
            if self._memory is not None:
                with self.check("device memory", step):
                    if (warning := self._memory.require_enough(step)) is not None:
                        self._job.console.say(warning)
            self.require_same_state()

    def compares_after(self, steps: int) -> bool:
        """Whether processes compare after so many steps what they have alike.

        After each epoch and before each save; also after 1, 2, 4, 8, … steps of this start, to see it soon.
        """
        return (steps - self._began_at).bit_count() == 1 or self._saving.may_save(steps)

    def require_same_state(self) -> None:
        """Compare what all ranks have alike; a collective. Raises Finding (2) for the first tensor that differs."""
        state, collectives = self._state, self._job.collectives
        if not self.checks or collectives.world.world_size == 1:
            return
        with self.check("same state", state.step):
            if collectives.are_alike(fast_digest(replicated(state))):
                return
            stops = self._job.options.on_difference == "stop"
            so = f"this step is not saved, {self._saving.newest}" if stops else "the ranks train other models now"
            if found := first_difference(collectives.gather, replicated(state)):
                raise other_state(found, state.step, so)


def other_state(found: str, step: int, so: str) -> Finding:
    """The error for what `first_difference` has found; `so` says what comes of it."""
    return Finding(
        f"after step {step} {found}, so {so}. It was changed on some ranks alone: by a callback, a hook or an "
        "optimizer that does not do the same on every rank (a callback that changes something needs "
        '`ranks = "all"`), by a forward that changes weights (nn.Embedding with max_norm), or by a machine that '
        "computes wrongly"
    )


def replicated(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """What every rank has a copy of, by names that a message can tell, in one sequence on all ranks."""
    # What differs first is named: here the cause, where weights follow from it.
    yield from group_numbers(state.optimizer.param_groups, "optimizer group ")
    yield from state.ownership.replicated()
    if state.average is not None:
        for name, value in state.average.module.state_dict().items():
            if isinstance(value, Tensor):
                yield f"the averaged {name}", value


class DeviceMemory:
    """Watches torch's allocator, whose counts tell of a lack that cuDNN has met and said nothing of.

    A library may then silently go on with a kernel that needs less: cuDNN's next plan after one that finds no workspace
    has other bits (aten/src/ATen/native/cudnn/Conv_v8.cpp). On a GPU this has run, and has met no lack.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._has_warned = False
        self._before = self._counts()

    def require_enough(self, step: int) -> str | None:
        """A warning, once, where some rank's memory is nearly full; a collective.

        Raises Finding (4), on every rank, where it ran out and training went on all the same.
        """
        ours = [now - before for now, before in zip(self._counts(), self._before, strict=True)]
        everyones = self._collectives.gather((self._collectives.world.place, *ours))
        for place, _, failed in everyones:
            if failed:
                raise Finding(
                    f"{place}: the device's memory ran out up to step {step}, and something went on with less, such as "
                    "cuDNN with another kernel, whose bits are others; use a smaller --set micro_batch=N, or end what "
                    "else is on the device",
                    ExitCode.RESOURCES,
                )
        short = [place for place, emptied, _ in everyones if emptied]
        if not short or self._has_warned:
            return None
        self._has_warned = True
        return (
            f"warning: {short[0]}: the device's memory is nearly full, torch had to give back what it kept; with a "
            "little less, cuDNN takes other kernels and the run ends"
        )

    def _counts(self) -> tuple[int, int]:
        """How often torch gave back what it had kept, to find room, and how often that was not enough."""
        found = torch.cuda.memory_stats(self._collectives.device)
        return found.get("num_alloc_retries", 0), found.get("num_ooms", 0)

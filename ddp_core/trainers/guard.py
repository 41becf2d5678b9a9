"""The guard of a run: what it found of the promise that the result does not depend on the layout, and what follows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from ddp_core.base.errors import UserError
from ddp_core.trainers.job import Job


class Guard:
    """Ends a run where one of its checks finds other bits, or with `--on-difference warn` marks its record once.

    All ranks make the same checks in the same steps and meet the same findings. Only a run with the exact reduction
    promises anything.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.mode = job.options.guard if job.options.reduction == "exact" else "off"
        self.is_broken = False
        """Whether something was found, and the run goes on all the same; nothing is checked any more."""
        self.figures: dict[str, Any] = {"mode": self.mode, "seconds": {}}
        """What run.json keeps of the guard, in `attempts`: among them the seconds of each kind of check."""

    @property
    def checks(self) -> bool:
        """Whether anything is still to be checked."""
        return self.mode != "off" and not self.is_broken

    @contextlib.contextmanager
    def check(self, kind: str, step: int) -> Iterator[None]:
        """Make one check inside, after `step` steps, which raises UserError on every rank for what it finds.

        `kind` names it in the figures.
        """
        began = time.perf_counter()
        try:
            yield
        except UserError as error:
            if self._job.options.on_difference == "stop":
                raise
            self.is_broken = True
            self._job.console.say(f"warning: {error}; the run goes on as asked, and its record says so")
            if self._job.broken is not None:
                self._job.broken(step, str(error))
        finally:
            seconds = self.figures["seconds"]
            seconds[kind] = seconds.get(kind, 0.0) + time.perf_counter() - began

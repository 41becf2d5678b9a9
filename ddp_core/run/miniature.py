"""An experiment in miniature, two epochs cut to five steps, and the ways in which it is trained for a rehearsal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from ddp_core.base.errors import ExitCode
from ddp_core.config.layout import Layout
from ddp_core.experiment.request import Request
from ddp_core.record.directory import find_runs
from ddp_core.run.repeat import Repeated, Training, elsewhere

LIMIT = 600.0
"""Seconds that a training may take, so that one that hangs ends with a line."""


@dataclass(frozen=True)
class Miniature:
    """The request in miniature."""

    request: Request
    killed_after: int
    """The step after which a training is killed, within the second epoch where there is one; 0: too short for that."""

    @classmethod
    def of(cls, request: Request, samples: int) -> Self:
        """That of a request whose data have so many samples to train."""
        small = request.loaded.experiment.in_miniature()
        each = small.steps_per_epoch(small.samples_in_miniature(samples))
        killed_after = min(each + 2, small.total_steps(each) - 1)
        loaded = replace(request.loaded, experiment=small)
        return cls(replace(request, loaded=loaded), killed_after if killed_after > 1 else 0)

    def training(
        self, layout: Layout, folder: Path, asked: Mapping[str, Any] | None = None, **options: Any
    ) -> Training:
        """Begin to train it, by default from the beginning; `asked` and `options` as for `elsewhere`."""
        given = {"miniature": True, "fork": None, "at": None, **(asked or {})}
        return Training(elsewhere(self.request, layout, folder, given, **options), folder)

    def killed_and_resumed(self, layout: Layout, folder: Path, **options: Any) -> Repeated:
        """Train it on the layout, where all ranks are killed and begin anew with the checkpoint of the step before."""
        if not self.killed_after:
            return self.training(layout, folder, **options).wait(LIMIT)
        options["checkpoint_every"] = self.killed_after - 1
        before = self.training(layout, folder, faults=(f"kill@{self.killed_after}",), **options).wait(LIMIT)
        run = next((found.path for found, _ in find_runs(folder / "runs")), None)
        if run is None or max(before.sums[0], default=0) < self.killed_after:
            return before if before.code else replace(before, code=int(ExitCode.INTERNAL), said="it was not killed")
        again = folder / "resumed"
        after = self.training(layout, again, {"resume": str(run)}, **options).wait(LIMIT)
        # The step before the kill is noted twice; the later note counts, which a resume has made.
        sums = [{**one, **other} for one, other in zip(before.sums, after.sums, strict=True)]
        return Repeated(after.code, after.said, sums)

"""What a run is made of, and what of it has changed since the attempt before; for the record and for the user."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddp_core.base.fingerprint import fingerprint_differences
from ddp_core.config.experiment import Component
from ddp_core.data.data_digest import DataDigest, changed_at
from ddp_core.experiment.request import Request
from ddp_core.experiment.source import FOLDER, Source, changed_files, diff, read_source
from ddp_core.record.continuing import kept_length
from ddp_core.record.data import recorded_digest
from ddp_core.record.directory import RunDirectory
from ddp_core.record.initial_weights import InitialWeights

_NOT_PROMISED = "warning: bit-identity with the steps before is not promised,"


@dataclass(frozen=True)
class Origin:
    """What the result follows from, beside the experiment's settings."""

    source: Source
    data: DataDigest
    weights: InitialWeights | None = None
    """None: random ones, drawn from the experiment's seed."""


@dataclass
class Changes:
    """What a new attempt changes."""

    source: dict[str, Any]
    """The `source` of run.json: of the newest code."""
    attempt: dict[str, Any] = field(default_factory=dict)
    """What the attempt's entry in run.json says of the change."""
    notes: list[str] = field(default_factory=list)
    """A line each for the user."""
    fingerprint: bool = False

    @classmethod
    def since(
        cls,
        before: Mapping[str, Any],
        directory: RunDirectory,
        request: Request,
        origin: Origin,
        fingerprint: Mapping[str, Any],
        steps_per_epoch: int,
    ) -> Changes:
        """Compare with the record before (empty for a new run), and keep the code where it is new or has changed.

        Raises UserError (4) where the code cannot be written.
        """
        if "source" not in before:
            origin.source.write(directory.path / FOLDER)
            return cls(origin.source.to_json(FOLDER), {"source": FOLDER})
        changes = cls(before["source"], {"source": before["source"]["folder"]})
        changes._see_source(directory, origin.source, number=len(before["attempts"]) + 1)
        changes._see_data(recorded_digest(directory.path, before), origin.data)
        changes._see_length(before, request, steps_per_epoch)
        other = fingerprint_differences(fingerprint, before["fingerprint"])
        changes.fingerprint = bool(other)
        changes.notes += [f"{_NOT_PROMISED} {line}" for line in other]
        return changes

    def _see_source(self, directory: RunDirectory, now: Source, number: int) -> None:
        before = read_source(directory.path, self.source)
        changed = changed_files(before.texts, now.texts)
        if not changed:
            return
        folder = f"{FOLDER}-{number}"
        now.write(directory.path / folder)
        self.source = now.to_json(folder)
        digest = hashlib.sha256(diff(before, now).encode(errors="surrogateescape")).hexdigest()
        self.attempt |= {"source": folder, "source_diff_sha256": digest}
        self.notes.append(
            f"warning: goes on with changed code ({', '.join(changed)}), kept in {folder}/; no single training gives "
            "the same result, so `ddp verify` cannot repeat it"
        )

    def _see_data(self, before: DataDigest, now: DataDigest) -> None:
        where = changed_at(before, now)
        if where is not None:
            self.attempt["data_changed"] = where
            self.notes.append(f"{_NOT_PROMISED} other data: {where}")

    def _see_length(self, before: Mapping[str, Any], request: Request, steps_per_epoch: int) -> None:
        experiment = request.loaded.experiment
        if before["experiment_sha256"] == experiment.digest():
            return
        # Only a finished run can come here with another experiment: one that is longer.
        steps = before["result"]["steps"]
        self.attempt["extended_from"] = {**kept_length(before), "step": steps}
        total = experiment.total_steps(steps_per_epoch)
        self.notes.append(f"extends the finished run from {steps} to {total} steps")
        schedule = experiment.schedule
        if isinstance(schedule, Component) or schedule.name == "cosine":
            sure = "depends" if schedule.name == "cosine" else "may depend"
            self.notes.append(
                f"warning: schedule {schedule.name} {sure} on the length of the run, and the first {steps} steps had "
                f"the rates of the shorter one: the result is not that of one run of {total} steps"
            )

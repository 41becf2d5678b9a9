"""What a new attempt at a run changes, and a fork of one: said to the user, and kept in the record."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddp_core.base.fingerprint import fingerprint_differences
from ddp_core.config.experiment import Component
from ddp_core.data.data_digest import DataDigest, changed_at
from ddp_core.experiment.kept_source import changed_files, diff, read_source
from ddp_core.experiment.request import Request
from ddp_core.experiment.source import FOLDER, Source
from ddp_core.record.continuing import differing, in_words, kept_length
from ddp_core.record.data import recorded_digest
from ddp_core.record.directory import RunDirectory
from ddp_core.record.recorded import broken_promise, not_promised
from ddp_core.record.run_json import RecordedFork

_UNLIKE_BEFORE = "bit-identity with the steps before is not promised,"


@dataclass
class Changes:
    """What a new attempt at a run changes."""

    source: dict[str, Any]
    """The `source` of run.json, which tells of the newest code."""
    attempt: dict[str, Any] = field(default_factory=dict)
    """The fields of the attempt in run.json that tell of the changes."""
    notes: list[str] = field(default_factory=list)
    """A line each for the user."""
    fingerprint: bool = False
    """Whether the fingerprint has changed."""

    @classmethod
    def since(
        cls,
        before: Mapping[str, Any],
        directory: RunDirectory,
        request: Request,
        source: Source,
        data: DataDigest,
        fingerprint: Mapping[str, Any],
        steps_per_epoch: int,
    ) -> Changes:
        """Compare with `before`, the content of run.json, and keep code that is changed. Raises as `not_promised`."""
        changes = cls(before["source"], {"source": before["source"]["folder"]})
        changes._note_source(directory, source, request, number=len(before["attempts"]) + 1)
        if (where := changed_at(recorded_digest(directory.path, before), data)) is not None:
            changes.attempt["data_changed"] = where
            changes.notes.append(not_promised(f"{_UNLIKE_BEFORE} other data: {where}", request.options))
        changes._note_length(before, request, steps_per_epoch)
        other = unlike_before(fingerprint, before["fingerprint"])
        changes.fingerprint = bool(other)
        changes.notes += [not_promised(line, request.options) for line in other]
        return changes

    def _note_source(self, directory: RunDirectory, now: Source, request: Request, number: int) -> None:
        before = read_source(directory.path, self.source)
        changed = changed_files(before.texts, now.texts)
        if not changed:
            return
        folder = f"{FOLDER}-{number}"
        self.notes.append(
            not_promised(
                f"goes on with changed code ({', '.join(changed)}), kept in {folder}/; no single training gives "
                "the same result, so `ddp verify` cannot repeat it",
                request.options,
            )
        )
        now.write(directory.path / folder)
        self.source = now.to_json(folder)
        digest = hashlib.sha256(diff(before, now).encode(errors="surrogateescape")).hexdigest()
        self.attempt |= {"source": folder, "source_diff_sha256": digest}

    def _note_length(self, before: Mapping[str, Any], request: Request, steps_per_epoch: int) -> None:
        experiment = request.loaded.experiment
        if not differing(before, experiment):
            return
        # An unfinished run with another experiment was refused before; a finished one may be made longer.
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


def unlike_before(here: Mapping[str, Any], there: Mapping[str, Any]) -> list[str]:
    """Why the steps from here on are not promised those before: a line for each difference of the fingerprints."""
    return [f"{_UNLIKE_BEFORE} {line}" for line in fingerprint_differences(here, there)]


def of_fork(
    fork: RecordedFork, parent: Mapping[str, Any], request: Request, fingerprint: Mapping[str, Any]
) -> list[str]:
    """A line each for the user: what a fork changes, and what of its parent's record keeps it from a promise."""
    changes = in_words(differing(parent, request.loaded.experiment)) or "no setting changed"
    notes = [f"fork of {fork['run']} at step {fork['step']}: {changes}"]
    notes += [not_promised(line, request.options) for line in unlike_before(fingerprint, parent["fingerprint"])]
    if (broken := broken_promise(parent)) is not None:
        notes.append(not_promised(f"the parent of this run has a {broken}", request.options))
    return notes

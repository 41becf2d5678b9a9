"""What a new attempt at a run changes, and a fork of it: said to the user, and kept in the record.

A fork (`--fork`) begins with the whole state of another run's checkpoint, with some settings changed. The checkpoint is
copied into the new run's directory, so that the new run may be killed and resumed like any other, and needs its parent
no more; `ddp verify` does, and follows the line of parents.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_core.base.beneath import make_folder_beneath, open_file
from ddp_core.base.digests import weights_digest
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import NewFile
from ddp_core.base.fingerprint import fingerprint_differences
from ddp_core.base.refusals import refused
from ddp_core.checkpoint import find_checkpoints, load, read_checkpoint
from ddp_core.config.experiment import Component, Experiment
from ddp_core.data.data_digest import DataDigest, changed_at
from ddp_core.experiment.kept_source import changed_files, diff, read_source
from ddp_core.experiment.request import Request
from ddp_core.experiment.source import FOLDER, Source
from ddp_core.record.continuing import differing, in_words, kept_length, refused_changes
from ddp_core.record.data import recorded_digest
from ddp_core.record.directory import RunDirectory
from ddp_core.record.recorded import broken_promise, not_promised
from ddp_core.record.run_json import RecordedFork

_UNLIKE_BEFORE = "bit-identity with the steps before is not promised,"
_PIECE = 2**24


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


def find_fork(request: Request, samples: int) -> RecordedFork:
    """Where the request's new run, which is to be a fork, branches off. Raises UserError, (3) without a checkpoint."""
    from ddp_core.record.trained import kept_checkpoint
    from ddp_core.record.weights import read_weights

    asked = request.asked
    assert asked.fork is not None
    parent = RunDirectory(Path(asked.fork))
    record = parent.read()
    if reason := refused_changes(differing(record, request.loaded.experiment)):
        raise UserError(
            f"--fork {parent.path}: {reason}. Set it as it was, or begin a run with the weights alone: "
            f"--init-from {parent.path}"
        )
    checkpoint = kept_checkpoint(parent, asked.at or "newest")
    experiment = request.loaded.experiment
    total = experiment.total_steps(experiment.steps_per_epoch(samples))
    if checkpoint.step >= total:
        raise UserError(
            f"--fork {parent.path}: the checkpoint is of step {checkpoint.step}, and {experiment.name} has {total} "
            "steps: set more epochs or max_steps, or choose an earlier checkpoint with --at STEP"
        )
    return {
        "given": asked.fork,
        "run": str(parent.path.resolve()),
        "step": checkpoint.step,
        "checkpoint_sha256": checkpoint.sha256,
        "weights_sha256": weights_digest(read_weights(checkpoint.path)),
        "experiment_sha256": str(checkpoint.metadata.get("experiment_sha256")),
        "hyperparameters": _hyperparameters(record, experiment),
    }


def bring_checkpoint(directory: RunDirectory, fork: RecordedFork) -> None:
    """Copy the checkpoint of which run.json says as `fork` that the run begins with it, unless the run has checkpoints.

    Raises UserError (3) where the parent's has gone or changed since, and (4) where it cannot be written.
    """
    if find_checkpoints(directory.checkpoints):
        return
    source = next(
        (each for each in find_checkpoints(RunDirectory(Path(fork["run"])).checkpoints) if each.step == fork["step"]),
        None,
    )
    if source is None or source.sha256 != fork["checkpoint_sha256"]:
        raise UserError(
            f"the checkpoint of step {fork['step']} of {fork['run']}, from which this run branches off, is "
            f"{'gone' if source is None else 'another one now'}",
            ExitCode.NO_CHECKPOINT,
        )
    try:
        make_folder_beneath(directory.checkpoints)
        for file in source.file_names:
            with (
                NewFile(directory.checkpoints / file, directory.path) as new,
                open_file(source.directory / file) as old,
            ):
                shutil.copyfileobj(old, new, _PIECE)
                new.sync()
                new.rename()
    except OSError as error:
        raise refused(error, directory.checkpoints) from None
    # It holds what it held when the run was begun: the manifest is that one, and each file is as the manifest says.
    load(read_checkpoint(directory.checkpoints / source.manifest.name, sha256=source.sha256))


def _hyperparameters(record: Mapping[str, Any], experiment: Experiment) -> list[str]:
    """The `hyperparameters` of a RecordedFork; `record` is the parent's.

    Raises UserError where the rate or the schedule differs under a schedule of the experiment's own, whose state holds
    the rates from before.
    """
    changes = differing(record, experiment)
    rates = [name for name in changes if name.startswith(("optimizer.", "schedule."))]
    if rates and isinstance(experiment.schedule, Component):
        raise UserError(
            f"--fork: {rates[0]} has changed, but the schedule is the experiment's own, and its state in the "
            "checkpoint holds the rates from before: leave it as it was, use a built-in schedule, or --init-from"
        )
    names = [name.removeprefix("optimizer.") for name in changes if name.startswith("optimizer.")]
    return [name for name in names if name not in ("lr", "reference_batch")]

"""`--fork`: a new run that begins with the whole state of another run's checkpoint, with some settings changed.

The checkpoint is copied into the new run's directory, so that the new run may be killed and resumed like any other, and
needs its parent no more; `ddp verify` does, and follows the line of parents.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_core.base.beneath import make_folder_beneath, open_file
from ddp_core.base.digests import weights_digest
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import NewFile
from ddp_core.base.refusals import refused
from ddp_core.checkpoint import find_checkpoints, read_checkpoint
from ddp_core.config.experiment import Component, Experiment
from ddp_core.experiment.request import Request
from ddp_core.record.continuing import differing, refused_changes
from ddp_core.record.directory import RunDirectory
from ddp_core.record.run_json import RecordedFork
from ddp_core.record.trained import kept_checkpoint
from ddp_core.record.weights import read_weights

_PIECE = 2**24


def find_fork(request: Request, samples: int) -> RecordedFork:
    """Where the request's new run, which is to be a fork, branches off. Raises UserError, (3) without a checkpoint."""
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
                while piece := old.read(_PIECE):
                    new.write(piece)
                new.sync()
                new.rename()
    except OSError as error:
        raise refused(error, directory.checkpoints) from None
    copied = read_checkpoint(directory.checkpoints / source.manifest.name, sha256=source.sha256)
    if weights_digest(read_weights(copied.path)) != fork["weights_sha256"]:
        raise UserError(
            f"the checkpoint of step {fork['step']} of {fork['run']} has changed since this run branched off",
            ExitCode.NO_CHECKPOINT,
        )


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

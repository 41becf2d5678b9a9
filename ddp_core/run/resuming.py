"""How a run goes on: it is the same experiment with the same code, and gets its newest state back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.shown import shown
from ddp_core.checkpoint import Checkpoint, Readers, describe, load
from ddp_core.distributed.world import World
from ddp_core.experiment.kept_source import changed_files, diff, read_source, shortened
from ddp_core.experiment.request import Request
from ddp_core.experiment.source import Source
from ddp_core.record.continuing import accepting_command, find_resumable, find_unfinished, require_continuable
from ddp_core.record.directory import RunDirectory
from ddp_core.trainers import Trainer


def found_to_continue(
    named: RunDirectory | None, request: Request, source: Source, samples: int, world: World
) -> RunDirectory | None:
    """The run to continue: the one that is `named`, else the one that the request means; None where there is none.

    `source`: the user's code today. `samples`: the number of training samples. Raises UserError (3) where that run has
    other settings, or was begun with other code.
    """
    found = named
    if named is not None:
        require_continuable(named, request, samples)
    else:
        found = find_resumable(request, samples) if request.resume == "auto" else find_unfinished(request)
    if found is not None:
        _require_source(found, request, source, world)
    return found


def _require_source(directory: RunDirectory, request: Request, source: Source, world: World) -> None:
    """Raises UserError (3), with what has changed, where the run began with other code that is not accepted."""
    record = directory.read()
    if request.asked.accept_changed_code or "source" not in record:
        return
    before = read_source(directory.path, record["source"])
    changed = changed_files(before.texts, source.texts)
    if not changed:
        return
    names, command = ", ".join(changed), accepting_command(directory, request)
    if world.launch_id is not None and record.get("launch_id") == world.launch_id:
        raise UserError(
            f"{names} changed while this launch trained, so its workers cannot start again with the same code: "
            f"undo the edit and use --resume auto, or go on with the new code: {command}",
            ExitCode.NO_CHECKPOINT,
        )
    raise UserError(
        f"the code has changed since {directory.path} was begun ({names}). To continue with the new code: {command} "
        f"To start anew: --resume never\n{shortened(diff(before, source))}",
        ExitCode.NO_CHECKPOINT,
    )


def resume(trainer: Trainer, start: Checkpoint, directory: RunDirectory, is_changed: bool) -> None:
    """Load the checkpoint `start`. `is_changed`: whether something has changed since the run began."""
    job = trainer.job
    # A run that was extended has checkpoints of the shorter experiment.
    record = directory.read()
    ours = [attempt.get("experiment_sha256") for attempt in record["attempts"]]
    fork = record.get("forked_from")
    if fork is not None and fork["step"] != start.step:
        fork = None  # it has a checkpoint of its own by now
    if fork is not None:
        ours.append(fork["experiment_sha256"])
    theirs = start.metadata.get("experiment_sha256")
    state = load_together(trainer, start, {"experiment_sha256": theirs if theirs in ours else job.experiment.digest()})
    fresh = [dict(group) for group in trainer.state.optimizer.param_groups]
    trainer.state.load_state_dict(state)
    trainer.saving.newest_step = trainer.state.step
    if fork is not None or theirs != job.experiment.digest():
        trainer.state.position.ended_early = None  # another training, or a longer one, was asked for since
        trainer.state.mark()
    if fork is not None:
        _take_hyperparameters(trainer.state.optimizer, fresh, fork["hyperparameters"])
    trainer.witnessed.go_on(is_changed=is_changed, is_fork=fork is not None)
    job.metrics.write("resume", step=trainer.state.step, ranks=job.collectives.world.world_size)
    job.console.say(f"resumed at step {trainer.state.step} (written on {shown(str(start.metadata['layout']))})")


def load_together(trainer: Trainer, checkpoint: Checkpoint, expect_metadata: Mapping[str, Any] | None = None) -> Any:
    """The state of a checkpoint, whose files the ranks verify together; in parts where the layout saves in parts.

    Raises UserError (3), on every rank, where a file is damaged or its weights are of another model.
    """
    collectives = trainer.job.collectives
    world, weights = collectives.world, describe(trainer.state.ownership.described_weights())

    def agree(error: Exception | None) -> None:
        if (first := next(filter(None, collectives.gather(error)), None)) is not None:
            raise first

    return load(
        checkpoint,
        expect={f"model.{name}": shape for name, shape in weights.items()},
        only=["model"],
        expect_metadata=expect_metadata,
        readers=Readers(world.local_rank, world.nproc_per_node, agree),
        in_parts=trainer.job.layout.saves_in_parts,
    )


def _take_hyperparameters(optimizer: Optimizer, fresh: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Put these entries of the `fresh` parameter groups in the place of those that the checkpoint has brought.

    Raises UserError where the optimizer keeps no entry of such a name.
    """
    for name in names:
        for group, new in zip(optimizer.param_groups, fresh, strict=True):
            if name not in new:
                raise UserError(
                    f"--fork: optimizer.{name} has changed, but {type(optimizer).__name__} keeps no {name} in its "
                    "param_groups, so its state from before cannot take the new value: leave it, or use --init-from"
                )
            group[name] = new[name]

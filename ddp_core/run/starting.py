"""Where a run starts or goes on: its directory and record, its checkpoint or weights, chosen by rank 0 for all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from torch.optim import Optimizer

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.refusals import refused
from ddp_core.base.shown import shown
from ddp_core.checkpoint import Checkpoint, Readers, describe, load, newest_valid, read_checkpoint
from ddp_core.data.data_digest import DataDigest, changed_at
from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.world import World
from ddp_core.experiment.kept_source import changed_files, diff, read_source, shortened
from ddp_core.experiment.request import Request
from ddp_core.experiment.source import Source
from ddp_core.observe.heartbeat import clear_heartbeats
from ddp_core.observe.metrics import Console
from ddp_core.record.continuing import command_for, find_resumable, find_unfinished, require_continuable
from ddp_core.record.data import recorded_digest
from ddp_core.record.directory import RunDirectory, find_launch, pass_over
from ddp_core.record.lock import RunLock
from ddp_core.record.run_json import RecordedFork, RecordedWeights
from ddp_core.record.run_record import Begun, Origin, RunRecord
from ddp_core.trainers import Trainer

_P = ParamSpec("_P")
_Choice = TypeVar("_Choice")


def by_rank_0(collectives: Collectives, choose: Callable[_P, _Choice], *words: _P.args, **named: _P.kwargs) -> _Choice:
    """What `choose` returns on rank 0, the only rank that calls it, on every rank; every rank raises its error."""
    answer: tuple[_Choice | None, UserError | None] = (None, None)
    if collectives.world.is_first:
        try:
            answer = (choose(*words, **named), None)
        except (UserError, OSError) as error:
            answer = (None, error if isinstance(error, UserError) else refused(error))
    choice, failure = collectives.broadcast(answer)
    if failure is not None:
        raise failure
    return choice  # type: ignore[no-any-return]


@dataclass(frozen=True)
class ChosenRun:
    """The run that all ranks work on."""

    directory: RunDirectory
    weights: RecordedWeights | None
    """Those of step 0; None for random ones."""
    fork: RecordedFork | None
    """Where it branches off, if it is new and does."""


def choose_run(request: Request, source: Source, samples: int, data: DataDigest, world: World) -> ChosenRun:
    """The run to continue, or a new one. `source`, `samples` and `data`: as this process has them today."""
    directory, given = _choose_directory(request, source, samples, world), request.asked.init_from
    if (directory.path / "run.json").exists():
        return ChosenRun(directory, directory.read().get("init_from"), None)
    weights = None
    if given is not None:
        from ddp_core.record.weights import find_weights

        weights = find_weights(given)
    fork = None if request.asked.fork is None else _choose_fork(request, samples, data)
    return ChosenRun(directory, weights, fork)


def _choose_directory(request: Request, source: Source, samples: int, world: World) -> RunDirectory:
    """The directory of the run to continue, or a new one."""
    output, experiment = Path(request.options.output), request.loaded.experiment
    found: RunDirectory | None = None
    if request.resume not in ("auto", "never"):
        found = RunDirectory(Path(request.resume))
    elif world.launch_id is not None:
        found = find_launch(output, experiment, world.launch_id, pass_over)
    if found is not None:
        require_continuable(found, request, samples)
    elif request.resume == "auto":
        found = find_resumable(request, samples)
    elif world.restart_count > 0:
        found = find_unfinished(request)
    if found is None:
        return RunDirectory.create(output, experiment, request.layout)
    _require_source(found, request, source, world)
    return found


def _choose_fork(request: Request, samples: int, data: DataDigest) -> RecordedFork:
    """Where a new run branches off (`--fork`). Raises UserError, also where the data are others than the parent's."""
    from ddp_core.record.changes import find_fork

    fork = find_fork(request, samples)
    parent = RunDirectory(Path(fork["run"]))
    if (where := changed_at(recorded_digest(parent.path, parent.read()), data)) is not None:
        raise UserError(
            f"--fork {fork['given']}: the data have changed since ({where}), so its position means nothing: bring them "
            "back, or begin a run with the weights alone: --init-from"
        )
    return fork


def choose_checkpoint(collectives: Collectives, directory: RunDirectory, console: Console) -> Checkpoint | None:
    """The newest valid checkpoint, the same on every rank; None for a run that begins at step 0."""

    def newest() -> Checkpoint | None:
        if (fork := directory.read().get("forked_from")) is not None:
            from ddp_core.record.changes import bring_checkpoint

            bring_checkpoint(directory, fork)
        return newest_valid(directory.checkpoints, console.say)

    chosen = by_rank_0(collectives, newest)
    return None if chosen is None else read_checkpoint(chosen.manifest, sha256=chosen.sha256)


def _start(record: RunRecord, lock: RunLock) -> Begun:
    """Take the lock of the run directory, and begin the record."""
    world, directory = record.world, record.directory
    try:
        lock.acquire()
    except UserError as error:
        # A worker of this launch that was stopped (SIGSTOP) may still hold the lock. This worker then trains without
        # it: the fence keeps the other one from writing.
        is_held = error.exit_code == ExitCode.BAD_INPUT and world.launch_id is not None
        if not is_held or directory.read().get("launch_id") != world.launch_id:
            raise
    return record.start()


@contextmanager
def open_record(
    collectives: Collectives,
    request: Request,
    directory: RunDirectory,
    origin: Origin,
    steps_per_epoch: int,
    console: Console,
) -> Iterator[RunRecord]:
    """The record of the run; rank 0 begins it, and holds the lock of the run directory until the block ends."""
    world, record = collectives.world, RunRecord(request, collectives, directory, origin, steps_per_epoch)
    with ExitStack() as stack:
        lock = RunLock(directory.path)
        stack.callback(lock.release)
        record.begun = by_rank_0(collectives, _start, record, lock)
        if world.is_first:
            clear_heartbeats(directory.path)
            assert record.fence is not None
            console.log_to(directory.log, record.fence.check)
        yield record


def _require_source(directory: RunDirectory, request: Request, source: Source, world: World) -> None:
    """Raises UserError (3), with what has changed, where the run began with other code that is not accepted."""
    record = directory.read()
    if request.asked.accept_changed_code or "source" not in record:
        return
    before = read_source(directory.path, record["source"])
    changed = changed_files(before.texts, source.texts)
    if not changed:
        return
    command = command_for(request, resume=str(directory.path), accept_changed_code=True)
    names = ", ".join(changed)
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
    """The state of a checkpoint, whose files the ranks verify together; in parts where the layout saves in parts."""
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
    """Put these entries of the `fresh` parameter groups in the place of those that the checkpoint has brought."""
    for name in names:
        for group, new in zip(optimizer.param_groups, fresh, strict=True):
            if name not in new:
                raise UserError(
                    f"--fork: optimizer.{name} has changed, but {type(optimizer).__name__} keeps no {name} in its "
                    "param_groups, so its state from before cannot take the new value: leave it, or use --init-from"
                )
            group[name] = new[name]

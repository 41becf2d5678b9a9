"""The directory of a run, the checkpoint and the weights that it continues from, chosen by rank 0 for every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.checkpoint import Checkpoint, Readers, describe, load, newest_valid, read_checkpoint
from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.world import World
from ddp_core.experiment.request import Request
from ddp_core.experiment.source import Source, changed_files, diff, read_source, shortened
from ddp_core.observe.metrics import Console, read_metrics
from ddp_core.record.continuing import (
    accepting_command,
    find_resumable,
    find_unfinished,
    recorded_weights,
    require_continuable,
)
from ddp_core.record.directory import RunDirectory, find_launch
from ddp_core.record.initial_weights import InitialWeights, find_weights
from ddp_core.trainers import Trainer

Value = TypeVar("Value")


def choose_directory(request: Request, source: Source, samples: int, collectives: Collectives) -> RunDirectory:
    """The run's directory, chosen by rank 0: a resumed one or a fresh one.

    `samples`: of the training data. Raises UserError (3) on every rank where the run that is to be continued has other
    settings, or was begun with other code.
    """

    def choose() -> str:
        found = _find(request, samples, collectives.world)
        if found is None:
            output = Path(request.options.output)
            return str(RunDirectory.create(output, request.loaded.experiment, request.layout).path)
        _require_source(found, request, source, collectives.world)
        return str(found.path)

    return RunDirectory(Path(_decided_by_first(collectives, choose)))


def _find(request: Request, samples: int, world: World) -> RunDirectory | None:
    output, experiment = Path(request.options.output), request.loaded.experiment
    found: RunDirectory | None = None
    if request.resume not in ("auto", "never"):
        found = RunDirectory(Path(request.resume))
    elif world.launch_id is not None:
        found = find_launch(output, experiment, world.launch_id)
    if found is not None:
        require_continuable(found, request, samples)
        return found
    if request.resume == "auto":
        return find_resumable(request, samples)
    return find_unfinished(request) if world.restart_count > 0 else None


def _require_source(directory: RunDirectory, request: Request, source: Source, world: World) -> None:
    """Raises UserError (3), with what has changed, where the run was begun with other code and that is not accepted."""
    record = directory.read()
    accepted = request.asked is not None and request.asked.accept_changed_code
    if accepted or "source" not in record:
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


def choose_weights(request: Request, directory: RunDirectory, collectives: Collectives) -> InitialWeights | None:
    """The weights that the run starts from (`--init-from`), chosen by rank 0; None for random ones."""

    def choose() -> InitialWeights | None:
        if (directory.path / "run.json").exists():
            return recorded_weights(directory.read())
        given = request.asked.init_from if request.asked is not None else None
        return None if given is None else find_weights(given)

    return _decided_by_first(collectives, choose)


def choose_checkpoint(directory: RunDirectory, collectives: Collectives, console: Console) -> Checkpoint | None:
    """The newest valid checkpoint, the same on every rank; None for a run that begins at step 0."""

    def choose() -> tuple[str, str] | None:
        checkpoint = newest_valid(directory.checkpoints, console.say)
        return None if checkpoint is None else (str(checkpoint.manifest), checkpoint.sha256)

    chosen = _decided_by_first(collectives, choose)
    return None if chosen is None else read_checkpoint(chosen[0], sha256=chosen[1])


def resume(trainer: Trainer, start: Checkpoint | None, directory: RunDirectory, notes: Sequence[str]) -> None:
    """Continue at the checkpoint, if there is one, and say what is other than before (`notes`)."""
    job = trainer.job
    for line in notes:
        job.console.say(line)
    if start is None:
        if job.collectives.world.is_first and read_metrics(directory.metrics):
            job.metrics.write("resume", step=0)
        return
    # A run that was extended has checkpoints of the shorter experiment.
    ours = [attempt.get("experiment_sha256") for attempt in directory.read()["attempts"]]
    theirs = start.metadata.get("experiment_sha256")
    world, weights = job.collectives.world, describe(trainer.state.ownership.described_weights())

    def agree(error: Exception | None) -> None:
        if (first := next(filter(None, job.collectives.gather(error)), None)) is not None:
            raise first

    state = load(
        start,
        expect={f"model.{name}": shape for name, shape in weights.items()},
        only=["model"],
        expect_metadata={"experiment_sha256": theirs if theirs in ours else trainer.experiment.digest()},
        readers=Readers(world.local_rank, world.nproc_per_node, agree),
        in_parts=job.layout.saves_in_parts,
    )
    trainer.state.load_state_dict(state)
    job.metrics.write("resume", step=trainer.state.step)
    job.console.say(f"resumed at step {trainer.state.step} (written on {start.metadata['layout']})")


def _decided_by_first(collectives: Collectives, decide: Callable[[], Value]) -> Value:
    """Rank 0's decision on every rank; a UserError of rank 0 is also raised on every rank."""
    answer: tuple[Value | None, UserError | None] = (None, None)
    if collectives.world.is_first:
        try:
            answer = (decide(), None)
        except UserError as error:
            answer = (None, error)
    value, failure = collectives.broadcast(answer)
    if failure is not None:
        raise failure
    return value  # type: ignore[no-any-return]

"""The directory of a run and the checkpoint that it continues from, chosen by rank 0 for every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from ddp_core.checkpoint import Checkpoint, describe, load, newest_valid, read_checkpoint
from ddp_core.distributed.process_group import Collectives
from ddp_core.errors import UserError
from ddp_core.observe.metrics import Console, read_metrics
from ddp_core.run.directory import RunDirectory, find_launch, find_resumable, require_experiment
from ddp_core.run.request import Request
from ddp_core.trainers import Trainer

Value = TypeVar("Value")


def choose_directory(request: Request, collectives: Collectives) -> RunDirectory:
    """The run's directory, chosen by rank 0: a resumed one or a fresh one."""

    def choose() -> str:
        output, experiment, world = Path(request.options.output), request.loaded.experiment, collectives.world
        found: RunDirectory | None = None
        if request.resume not in ("auto", "never"):
            found = RunDirectory(Path(request.resume))
            require_experiment(found, experiment)
        elif world.launch_id is not None:
            found = find_launch(output, experiment, world.launch_id)
        if found is None and (request.resume == "auto" or world.restart_count > 0):
            found = find_resumable(output, experiment)
        return str((found or RunDirectory.create(output, experiment, request.layout)).path)

    return RunDirectory(Path(_decided_by_first(collectives, choose)))


def choose_checkpoint(directory: RunDirectory, collectives: Collectives, console: Console) -> Checkpoint | None:
    """The newest valid checkpoint, the same on every rank; None for a run that begins at step 0."""

    def choose() -> tuple[str, str] | None:
        checkpoint = newest_valid(directory.checkpoints, console.say)
        return None if checkpoint is None else (str(checkpoint.manifest), checkpoint.sha256)

    chosen = _decided_by_first(collectives, choose)
    return None if chosen is None else read_checkpoint(chosen[0], sha256=chosen[1])


def resume(trainer: Trainer, start: Checkpoint | None, directory: RunDirectory, changed: Sequence[str]) -> None:
    """Continue at the checkpoint, if there is one; `changed`: how this machine differs from the one that wrote it."""
    job = trainer.job
    if start is None:
        if job.collectives.world.is_first and read_metrics(directory.metrics):
            job.metrics.write("resume", step=0)
        return
    state = load(
        start,
        expect={f"model.{name}": shape for name, shape in describe(trainer.model.state_dict()).items()},
        only=["model"],
        expect_metadata={"experiment_sha256": trainer.experiment.digest()},
    )
    trainer.state.load_state_dict(state)
    job.metrics.write("resume", step=trainer.state.step)
    job.console.say(f"resumed at step {trainer.state.step} (written on {start.metadata['layout']})")
    for line in changed:
        job.console.say(f"warning: bit-identity with the steps before is not promised, {line}")


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

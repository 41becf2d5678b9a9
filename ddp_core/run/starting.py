"""Where a run starts: its directory and record, and the checkpoint or the weights, chosen by rank 0 for every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.refusals import refused
from ddp_core.checkpoint import Checkpoint, newest_valid, read_checkpoint
from ddp_core.data.data_digest import DataDigest, changed_at
from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.world import World
from ddp_core.experiment.request import Request
from ddp_core.experiment.source import Source
from ddp_core.observe.heartbeat import clear_heartbeats
from ddp_core.observe.metrics import Console
from ddp_core.record.data import recorded_digest
from ddp_core.record.directory import RunDirectory, find_launch, pass_over
from ddp_core.record.lock import RunLock
from ddp_core.record.run_json import RecordedFork, RecordedWeights
from ddp_core.record.run_record import Begun, Origin, RunRecord

_P = ParamSpec("_P")
_Choice = TypeVar("_Choice")


def by_rank_0(collectives: Collectives, choose: Callable[_P, _Choice], *words: _P.args, **named: _P.kwargs) -> _Choice:
    """What `choose` returns on rank 0, the only rank that calls it, on every rank; every rank raises its UserError.

    An OSError becomes one (4).
    """
    answer: tuple[_Choice | None, UserError | None] = (None, None)
    if collectives.world.is_first:
        try:
            answer = (choose(*words, **named), None)
        except UserError as error:
            answer = (None, error)
        except OSError as error:
            answer = (None, refused(error))
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
    """The run to continue, or a new one. Raises UserError as the functions below do.

    `source`: the user's code today. `samples`: the number of training samples. `data`: their digest.
    """
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
    """The directory of the run to continue, or a new one.

    Raises UserError (3) where the run to continue has other settings, or was begun with other code.
    """
    output, experiment = Path(request.options.output), request.loaded.experiment
    found: RunDirectory | None = None
    if request.resume not in ("auto", "never"):
        found = RunDirectory(Path(request.resume))
    elif world.launch_id is not None:
        found = find_launch(output, experiment, world.launch_id, pass_over)
    if found is not None or request.resume == "auto" or world.restart_count > 0:
        from ddp_core.run.resuming import found_to_continue

        found = found_to_continue(found, request, source, samples, world)
    return found or RunDirectory.create(output, experiment, request.layout)


def _choose_fork(request: Request, samples: int, data: DataDigest) -> RecordedFork:
    """Where a new run branches off (`--fork`).

    Raises UserError as `find_fork` does, and where the data are others than those that the parent was trained on.
    """
    from ddp_core.record.forking import find_fork

    fork = find_fork(request, samples)
    parent = RunDirectory(Path(fork["run"]))
    if (where := changed_at(recorded_digest(parent.path, parent.read()), data)) is not None:
        raise UserError(
            f"--fork {fork['given']}: the data have changed since ({where}), so its position means nothing: bring them "
            "back, or begin a run with the weights alone: --init-from"
        )
    return fork


def choose_checkpoint(collectives: Collectives, directory: RunDirectory, console: Console) -> Checkpoint | None:
    """The newest valid checkpoint, the same on every rank; None for a run that begins at step 0.

    A fork begins with a copy of one. Raises UserError as `bring_checkpoint` does.
    """

    def newest() -> Checkpoint | None:
        if (fork := directory.read().get("forked_from")) is not None:
            from ddp_core.record.forking import bring_checkpoint

            bring_checkpoint(directory, fork)
        return newest_valid(directory.checkpoints, console.say)

    chosen = by_rank_0(collectives, newest)
    return None if chosen is None else read_checkpoint(chosen.manifest, sha256=chosen.sha256)


def _start(record: RunRecord, lock: RunLock) -> Begun:
    """Take the lock of the run directory, and begin the record.

    Raises UserError where the lock cannot be taken, and another launch holds it.
    """
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

"""One experiment on one layout becomes a run directory: what every worker process does, in order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from ddp_core.checkpoint import Checkpointer, Fence, describe, load, newest_valid, read_checkpoint, sweep
from ddp_core.determinism.kernels import make_deterministic
from ddp_core.distributed.process_group import Collectives, local_device, process_group
from ddp_core.distributed.stop import StopRequest
from ddp_core.distributed.world import World
from ddp_core.errors import UserError
from ddp_core.faults import FaultScript
from ddp_core.observe.heartbeat import Heartbeat, clear_heartbeats
from ddp_core.observe.ledger import Ledger
from ddp_core.observe.metrics import Console, MetricsWriter, read_metrics
from ddp_core.observe.profiling import StepProfiler, merge_traces
from ddp_core.run.directory import RunDirectory, find_launch, find_resumable, require_experiment
from ddp_core.run.environment import describe_code
from ddp_core.run.freed_memory import keep_freed_memory
from ddp_core.run.lock import RunLock
from ddp_core.run.record import RunRecord
from ddp_core.run.request import Request, build_parts, check_promise
from ddp_core.trainers import Job, Trainer, build_trainer

Value = TypeVar("Value")


def run(request: Request, world: World) -> RunDirectory:
    """Carry the request out as one worker of `world`; rank 0 keeps the run directory.

    Raises Stopped after a request, UserError for what the user can mend, and whatever the model raised.
    """
    options, experiment = request.options, request.loaded.experiment
    make_deterministic()
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopRequest(options.stop_signal, options.max_seconds))
        device = local_device(world, request.layout.device)
        if device.type == "cpu":
            keep_freed_memory()
        wraps = request.layout.kind == "ddp"
        collectives = stack.enter_context(process_group(world, device, options.timeout, options.backend, wraps))
        console = Console(world.rank, world.world_size)
        stack.callback(console.close)
        check_promise(request)
        _require_same(request, collectives)
        parts = build_parts(request.loaded, Path(options.data_dir))
        collectives.require_same(data=parts.splits.digest)
        directory = _choose_directory(request, world, collectives)
        record = RunRecord(request, world, directory, parts.splits.digest, device)
        if world.is_first:
            stack.enter_context(_hold(directory, record.launch_id))
            record.start()
            clear_heartbeats(directory.path)
            console.log_to(directory.log)
        attempt = collectives.broadcast(record.attempt)
        metrics = stack.enter_context(_metrics(request, world, directory, record.fence))
        job = Job(
            experiment,
            request.layout,
            options,
            parts.model,
            parts.loss,
            parts.splits,
            collectives,
            device,
            console,
            metrics,
            stop,
            parts.hits,
            FaultScript(options.faults, world.rank, directory.path),
            heartbeat=Heartbeat(directory.path, world, record.usage),
        )
        with record.outcome():
            trainer = stack.enter_context(_trainer(job))
        record.state = trainer.state
        with record.outcome():
            _announce(request, directory, trainer)
            _resume(trainer, directory, record)
            if options.ledger:
                job.ledger = Ledger(directory.path, attempt, world.rank, trainer.state.step)
                stack.callback(job.ledger.close)
            with _checkpointer(trainer, directory, record), _profiler(trainer, directory):
                record.usage.restart()
                trainer.train()
            record.finish(trainer, collectives)
    return directory


def _require_same(request: Request, collectives: Collectives) -> None:
    code = describe_code()
    facts = {
        "experiment": request.loaded.experiment.digest(),
        "code version": f"{code['version']} {code['commit']}",
        "layout": request.layout.label,
        "reduction": request.options.reduction,
    }
    collectives.require_same(**facts)


def _choose_directory(request: Request, world: World, collectives: Collectives) -> RunDirectory:
    """The run's directory, chosen by rank 0: a resumed one or a fresh one."""

    def choose() -> str:
        output, experiment = Path(request.options.output), request.loaded.experiment
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


def _decided_by_first(collectives: Collectives, decide: Callable[[], Value]) -> Value:
    """Rank 0's decision on every rank; its UserError is raised on every rank, too."""
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


@contextlib.contextmanager
def _hold(directory: RunDirectory, launch_id: str | None) -> Iterator[None]:
    """The right to run here. A stopped worker of the same launch may still hold the lock; the fence keeps it from
    writing.
    """
    lock = RunLock(directory.path)
    try:
        lock.acquire()
    except UserError:
        if launch_id is None or directory.read().get("launch_id") != launch_id:
            raise
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _metrics(request: Request, world: World, directory: RunDirectory, fence: Fence | None) -> Iterator[MetricsWriter]:
    board = directory.path / "tensorboard" if request.options.tensorboard and world.is_first else None
    may_write = fence.check if fence is not None else lambda: None
    with MetricsWriter(directory.metrics if world.is_first else None, board, may_write) as metrics:
        yield metrics


@contextlib.contextmanager
def _trainer(job: Job) -> Iterator[Trainer]:
    trainer = build_trainer(job)
    try:
        yield trainer
    finally:
        trainer.close()


@contextlib.contextmanager
def _checkpointer(trainer: Trainer, directory: RunDirectory, record: RunRecord) -> Iterator[None]:
    if not trainer.job.collectives.world.is_first:
        yield
        return
    options, console = trainer.options, trainer.job.console
    sweep(directory.checkpoints)
    with Checkpointer(
        directory.checkpoints,
        keep_last=options.keep_last,
        keep_every=options.keep_every,
        asynchronous=options.asynchronous_save,
        fence=record.fence,
        on_event=lambda line: console.warn(line.removeprefix("warning: ")) if line.startswith("warning") else None,
    ) as trainer.checkpointer:
        yield


@contextlib.contextmanager
def _profiler(trainer: Trainer, directory: RunDirectory) -> Iterator[None]:
    if trainer.options.profile is None:
        yield
        return
    collectives = trainer.job.collectives
    with StepProfiler(trainer.options.profile, directory.path, collectives.world.rank) as trainer.job.profiler:
        yield
    collectives.barrier()
    merged = merge_traces(directory.path) if collectives.world.is_first else None
    if merged is not None:
        trainer.job.console.say(f"trace of all ranks: {merged} (open it in ui.perfetto.dev or chrome://tracing)")


def _announce(request: Request, directory: RunDirectory, trainer: Trainer) -> None:
    say = trainer.job.console.say
    say(
        f"{trainer.experiment.name} on {request.layout.description}, reduction {request.options.reduction}, "
        f"{trainer.total_steps} steps ({trainer.steps_per_epoch} per epoch)"
    )
    say(trainer.cut.describe())
    say(f"run directory {directory.path}")


def _resume(trainer: Trainer, directory: RunDirectory, record: RunRecord) -> None:
    """Continue at the newest valid checkpoint, the same on every rank, if there is one."""
    job = trainer.job

    def choose() -> tuple[str, str] | None:
        checkpoint = newest_valid(directory.checkpoints, job.console.say)
        return None if checkpoint is None else (str(checkpoint.manifest), checkpoint.sha256)

    chosen = _decided_by_first(job.collectives, choose)
    if chosen is None:
        if job.collectives.world.is_first and read_metrics(directory.metrics):
            job.metrics.write("resume", step=0)
        return
    checkpoint = read_checkpoint(chosen[0], sha256=chosen[1])
    state = load(
        checkpoint,
        expect={f"model.{name}": shape for name, shape in describe(trainer.model.state_dict()).items()},
        only=["model"],
        expect_metadata={"experiment_sha256": trainer.experiment.digest()},
    )
    trainer.state.load_state_dict(state)
    job.metrics.write("resume", step=trainer.state.step)
    job.console.say(f"resumed at step {trainer.state.step} (written on {checkpoint.metadata['layout']})")
    for line in record.changed_fingerprint:
        job.console.say(f"warning: bit-identity with the steps before is not promised, {line}")

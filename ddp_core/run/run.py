"""What a worker process does, in order; and how it ends: with an exit code and one report, whatever happened."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from ddp_core.base.determinism import has_tf32, use_chosen_threads
from ddp_core.base.ending import said_by
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.process import make_patient
from ddp_core.base.silent_ends import no_silent_end
from ddp_core.base.user_code import no_way_out
from ddp_core.checkpoint import Checkpointer, Fence, Ranks, sweep
from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.reports import die_with_launcher, report_end, report_error, tell_caller
from ddp_core.distributed.seat import stop_file
from ddp_core.distributed.stop import StopRequest
from ddp_core.distributed.world import World

# What names a failure is loaded before: after it, there may be no file that can be opened.
from ddp_core.experiment.blame import shortage, unforeseen, users_trace
from ddp_core.experiment.request import Request
from ddp_core.numerics.limits import rules_of
from ddp_core.observe.heartbeat import Heartbeat
from ddp_core.observe.lost_peers import is_peer_loss, short_message
from ddp_core.observe.metrics import Console, MetricsWriter
from ddp_core.observe.step import StepObserver
from ddp_core.record.directory import RunDirectory
from ddp_core.record.run_record import Origin, RunRecord
from ddp_core.run.asking import OverSocket
from ddp_core.run.beginning import Kept, begun
from ddp_core.run.live import LiveRecovery, require_told_once
from ddp_core.run.memory import require_room
from ddp_core.run.resuming import (
    by_rank_0,
    choose_checkpoint,
    choose_run,
    open_record,
    resume,
)
from ddp_core.trainers import Job, Trainer, build_trainer
from ddp_core.trainers.trial import check_loss

if TYPE_CHECKING:
    from ddp_core.observe.loggers.logger import BackgroundLogger


@said_by("ddp")
def worker_main(words: Sequence[str]) -> int:
    """Carry out the request of a launcher of ours as one of its workers; returns the exit code.

    `words`: the path of a file with the request (`Request.to_json`). Which rank this process is, the variables of the
    launcher say.
    """
    (file,) = words
    make_patient()
    use_chosen_threads()
    try:
        world = World.from_environment()
        if world.report_dir is not None:
            die_with_launcher(world.report_dir)
        request = Request.from_json(Path(file).read_text(encoding="utf-8"))
        if not world.is_live:
            request = request.for_nodes(world.nnodes)
    except UserError as error:
        return report_error(error)
    return run_worker(request, world)


def run_worker(request: Request, world: World) -> int:
    """Carry the request out as one worker of `world`, and return the exit code.

    How the worker ended is written to a report for the launcher, or printed where there is no launcher of ours.
    """

    def tell(line: str) -> None:
        report_end(world, ExitCode.BAD_INPUT, f"{world.place}: {line}")

    try:
        with no_silent_end(tell), no_way_out("your code"):
            if request.evaluated is None:
                run(request, world)
            else:
                from ddp_core.run.evaluating import evaluate_run

                evaluate_run(request, world)
    except UserError as error:
        return report_end(world, error.exit_code, str(error))
    except Exception as error:
        if known := shortage(error, world.place):
            return report_end(world, known.exit_code, str(known))
        if is_peer_loss(error):
            return report_end(world, ExitCode.PEERS_LOST, f"{world.place} lost a peer: {short_message(error)}")
        exit_code, message = unforeseen(error)
        trace = traceback.format_exc() if exit_code == ExitCode.INTERNAL else users_trace(error)
        return report_end(world, exit_code, f"{world.place}: {message}", trace)
    return ExitCode.DONE


def run(request: Request, world: World) -> None:
    """Train, and where the launcher offers it, go on without a rank that is lost.

    Raises Stopped after a request to stop, UserError for what the user can mend, and whatever the model raised.
    """
    launched = world.report_dir is not None
    stop = StopRequest(
        request.options.stop_signal,
        request.options.max_seconds,
        launched=launched,
        last=True,
        confirmed_by=stop_file(world.report_dir) if world.is_live and world.report_dir is not None else None,
    )
    with ExitStack() as heard:
        # It is heard from its first use on, until this process leaves.
        listen = cache(lambda: heard.enter_context(stop))
        if not world.is_live:
            _train(request, world, stop, listen)
            return
        live = LiveRecovery(world, request.options.timeout)
        if live.comes_late:
            live.kept.prepare(request)
        while (place := live.place(stop)) is not None:
            with live.surviving():
                _train(request.for_ranks(place.nnodes, place.nproc_per_node), place, stop, listen, live)
                return


def _train(
    request: Request,
    world: World,
    stop: StopRequest,
    listen: Callable[[], object],
    live: LiveRecovery | None = None,
) -> None:
    """Meet the other workers, build the parts, choose where to start, train, and keep the record (rank 0).

    `listen` is called where requests to `stop` begin to be heeded. Raises what `run` does, and Regroup where the
    workers have to meet anew.
    """
    kept = Kept() if live is None else live.kept
    with ExitStack() as stack:
        collectives, console, parts, own_metrics, source, data = stack.enter_context(
            begun(request, world, kept, None if live is None else live.is_left_behind)
        )
        samples = parts.splits.trained
        if kept.run is None:
            require_room(parts.model, request.loaded.experiment, request.layout, collectives.device)
        if live is not None:
            require_told_once(parts.callbacks, parts.observers)
        # Until here a request to stop ends the process: there is nothing to save, and no trace of the run.
        listen()
        chosen = by_rank_0(collectives, lambda: kept.run or choose_run(request, source, samples, data, world))
        kept.run, directory = chosen, chosen.directory
        origin = Origin(source, data, chosen.weights, chosen.fork)
        if world.local_rank == 0:
            tell_caller(directory.path)
        each = request.loaded.experiment.steps_per_epoch(samples)
        record = stack.enter_context(open_record(collectives, request, directory, origin, each, console))
        record.usage = kept.usage = kept.usage or record.usage
        metrics = stack.enter_context(_metrics(record, console))
        with record.outcome(), live.leaving() if live is not None else nullcontext():
            held = live.newest(collectives, directory) if live is not None else None
            start = choose_checkpoint(collectives, directory, console) if held is None else None
            if origin.weights is not None and start is None and held is None:
                from ddp_core.record.initial_weights import put_weights

                put_weights(parts.model, origin.weights)
            kept_every = by_rank_0(collectives, record.kept_every)
            first_step = start.step if start is not None else held.at.step if held is not None else 0
            heartbeat = Heartbeat(directory.path, world, record.usage)
            with ExitStack() as training:
                job = Job(
                    experiment=request.loaded.experiment,
                    layout=request.layout,
                    options=request.options,
                    model=parts.model,
                    loss=parts.loss,
                    hits=parts.hits,
                    splits=parts.splits,
                    optimizer=parts.optimizer,
                    schedule=parts.schedule,
                    own_metrics=own_metrics,
                    callbacks=parts.callbacks if live is None else live.same(parts.callbacks, held),
                    directory=directory.path,
                    only_steps=request.only_steps,
                    collectives=collectives,
                    device=collectives.device,
                    console=console,
                    metrics=metrics,
                    stop=stop,
                    broken=record.mark_broken,
                    has_random_data=record.is_random,
                    in_miniature=request.is_miniature,
                    noted_in=request.noted_in,
                    witness=OverSocket(directory.path) if world.is_first else None,
                    checkpointer=training.enter_context(_checkpointer(record, collectives, console, kept_every)),
                    kept_every=kept_every,
                    note_kept=record.note_kept if world.is_first else None,
                    makes_room=None if live is None else live.makes_room,
                    observers=[
                        heartbeat,
                        *parts.observers,
                        *training.enter_context(_observers(record, parts.model, collectives, console, first_step)),
                    ],
                )
                with collectives.never_stuck():
                    trainer = build_trainer(job)
                if live is not None:
                    # Called when the trainer is closed.
                    stack.callback(live.hold, trainer)
                stack.enter_context(closing(trainer))
                if live is not None:
                    live.await_built(collectives)
                record.state, record.guard = trainer.state, trainer.guard.figures
                if request.rehearsed is not None:
                    said, differs = request.rehearsed
                    record.guard["rehearsal"] = said
                    if differs:
                        record.mark_broken(0, said)
                        trainer.guard.is_broken = True
                if held is None:
                    _announce(trainer, directory)
                saved_step = None
                if held is not None and live is not None:
                    saved_step = held.saved_step
                    live.go_on(held, trainer)
                    held = None  # the weights of the trainer before
                else:
                    resume(trainer, start, directory, record.notes)
                    if start is None:
                        check_loss(trainer)
                record.usage.start()
                trainer.train(saved_step)
            record.finish(trainer, heartbeat.speed())


def _metrics(record: RunRecord, console: Console) -> MetricsWriter:
    """Rank 0's metrics and loggers; the other ranks write nothing."""
    if not record.world.is_first:
        return MetricsWriter(None)
    request, directory = record.request, record.directory
    loggers: list[BackgroundLogger] = []
    if request.options.log_to:
        from ddp_core.observe.loggers.logged import LoggedRun, loggable
        from ddp_core.observe.loggers.logger import start_loggers

        experiment = request.loaded.experiment
        settings = experiment.to_json() | {"layout": request.layout.label, "reduction": request.options.reduction}
        logged = LoggedRun(directory.path, experiment.name, loggable(settings))
        loggers = start_loggers(request.options.log_to, logged, console.warn)
    may_write = record.fence.check if record.fence is not None else lambda: None
    return MetricsWriter(directory.metrics, loggers, may_write)


@contextmanager
def _checkpointer(
    record: RunRecord, collectives: Collectives, console: Console, kept_every: int | None
) -> Iterator[Checkpointer | None]:
    """Rank 0's checkpointer; the other ranks have one where each rank writes its part."""
    request, world, directory = record.request, record.world, record.directory
    options, in_parts = request.options, request.layout.saves_in_parts
    if not (world.is_first or in_parts):
        yield None
        return
    if world.is_first:
        sweep(directory.checkpoints, root=directory.path)
    with ExitStack() as stack:
        fence, ranks = record.fence, None
        if in_parts:
            ranks = stack.enter_context(Ranks.meeting(world.place, options.timeout))
            # All parts are written in the name of rank 0, so a later rank 0 takes this right from all ranks.
            fence = Fence(directory.path, collectives.broadcast(fence.token if fence is not None else 0))
        checkpointer = stack.enter_context(
            Checkpointer(
                directory.checkpoints,
                keep_last=options.keep_last,
                keep_every=[each for each in (options.keep_every, kept_every) if each is not None],
                asynchronous=options.asynchronous_save,
                fence=fence,
                ranks=ranks,
                synced_before=(directory.path, directory.metrics, directory.log),
                on_event=lambda line: (
                    console.warn(line.removeprefix("warning: ")) if line.startswith("warning") else None
                ),
            )
        )
        try:
            yield checkpointer
        except Exception as error:
            if is_peer_loss(error):
                _raise_failed_save(checkpointer)
            raise


def _raise_failed_save(checkpointer: Checkpointer) -> None:
    """Raise the UserError with which a save in the background has failed, if one has.

    All ranks leave where one of them cannot save its part. A rank may notice that another one has left before it learns
    that the save has failed, and a lost peer would not tell the user why.
    """
    try:
        checkpointer.wait()
    except UserError:
        raise
    except Exception:
        return  # the lost peer has ended the save as well


@contextmanager
def _observers(
    record: RunRecord, model: nn.Module, collectives: Collectives, console: Console, first_step: int
) -> Iterator[list[StepObserver]]:
    """The observers that the options ask for: profiler, ledger and, always last in a step, scripted faults.

    `first_step`: the steps that were done before.
    """
    options, world, directory = record.request.options, record.world, record.directory.path
    with ExitStack() as stack:
        observers: list[StepObserver] = []
        if options.profile is not None:
            observers.append(stack.enter_context(_profiler(options.profile, directory, collectives, console)))
        elif rules_of(options.numerics) is not None and world.is_first and not record.request.is_tried:
            from ddp_core.observe.unknown_operations import UnknownOperations

            observers.append(stack.enter_context(closing(UnknownOperations(console.warn))))
        if options.ledger:
            from ddp_core.observe.ledger import Ledger

            observers.append(stack.enter_context(closing(Ledger(directory, record.attempt, world.rank, first_step))))
        if options.faults:
            from ddp_core.observe.faults import FaultScript

            observers.append(FaultScript(options.faults, world.rank, directory, model))
        yield observers


@contextmanager
def _profiler(window: str, directory: Path, collectives: Collectives, console: Console) -> Iterator[StepObserver]:
    """This rank's profiler; rank 0 puts the traces of all ranks together when training is over."""
    from ddp_core.observe.profiling import StepProfiler, merge_traces

    with StepProfiler(window, directory, collectives.world.rank) as profiler:
        yield profiler
    collectives.barrier()
    merged = merge_traces(directory) if collectives.world.is_first else None
    if merged is not None:
        console.say(f"trace of all ranks: {merged} (open it in ui.perfetto.dev or chrome://tracing)")


def _announce(trainer: Trainer, directory: RunDirectory) -> None:
    say, layout = trainer.job.console.say, trainer.job.layout
    say(
        f"{trainer.experiment.name} on {layout.description}, reduction {trainer.options.reduction}, "
        f"{trainer.total_steps} steps ({trainer.steps_per_epoch} per epoch)"
    )
    if trainer.experiment.precision == "tf32" and not has_tf32(trainer.device):
        say("precision tf32 needs a GPU of compute capability 8.0 or higher; here it is fp32, which gives other bits")
    if (rules := rules_of(trainer.options.numerics)) is not None:
        say(f"numerics portable (rules {rules}): the same bits on every x86-64 CPU with AVX2")
    if trainer.exact and trainer.guard.mode == "off":
        say("guard off: this run does not check that its result does not depend on the layout")
    say(trainer.cut.describe())
    say(f"run directory {directory.path}")

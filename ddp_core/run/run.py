"""What a worker process does, in order; and how it ends: with an exit code and one report, whatever happened."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

from ddp_core.base.determinism import has_tf32, use_chosen_threads
from ddp_core.base.ending import said_by
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.process import make_patient
from ddp_core.base.user_code import no_silent_end, no_way_out
from ddp_core.checkpoint import Checkpoint
from ddp_core.distributed.reports import die_with_launcher, report_end, report_error, tell_caller
from ddp_core.distributed.stop import StopRequest
from ddp_core.distributed.world import World

# What names a failure is loaded before: after it, there may be no file that can be opened.
from ddp_core.experiment.blame import shortage, unforeseen, users_trace
from ddp_core.experiment.request import Request
from ddp_core.model.losses import LOSSES
from ddp_core.numerics.limits import rules_of
from ddp_core.observe.heartbeat import Heartbeat
from ddp_core.observe.lost_peers import is_peer_loss, short_message
from ddp_core.observe.metrics import each_record
from ddp_core.record.directory import RunDirectory
from ddp_core.record.run_record import Origin, RunRecord
from ddp_core.run.beginning import Beginning, Prepared, begun
from ddp_core.run.job import job_of, metrics_of
from ddp_core.run.memory import require_room
from ddp_core.run.recovery import Recovery
from ddp_core.run.starting import by_rank_0, choose_checkpoint, choose_run, open_record, resume
from ddp_core.trainers import Trainer, build_trainer


@said_by("ddp")
def worker_main(words: Sequence[str]) -> int:
    """Carry out the request of a launcher of ours as one of its workers; returns the exit code. See `work`."""
    return work(words, Recovery)


def work(words: Sequence[str], kind: type[Recovery]) -> int:
    """Carry out a launcher's request, in the file that the one word names, with a recovery of this kind."""
    (file,) = words
    make_patient()
    try:
        world = World.from_environment()
        if world.report_dir is not None:
            die_with_launcher(world.report_dir)
        request = Request.from_json(Path(file).read_text(encoding="utf-8"))
        request = kind.first_request(request, world)
    except UserError as error:
        return report_error(error)
    return run_worker(request, world, kind)


def run_worker(request: Request, world: World, kind: type[Recovery] = Recovery) -> int:
    """Carry the request out as one worker of `world`, report how that ended, and return the exit code."""

    def tell(line: str) -> None:
        report_end(world, ExitCode.BAD_INPUT, f"{world.place}: {line}")

    use_chosen_threads()
    try:
        with no_silent_end(tell), no_way_out("your code"):
            if request.evaluated is None:
                run(request, world, kind(request, world))
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


def run(request: Request, world: World, recovery: Recovery) -> None:
    """Train, and where the recovery has it so, go on without a rank that is lost."""
    stop = StopRequest(
        request.options.stop_signal,
        request.options.max_seconds,
        launched=world.report_dir is not None,
        last=True,
        confirmed_by=recovery.stop_file,
    )
    with ExitStack() as heard:
        # It is heard from its first use on, until this process leaves.
        listen = cache(lambda: heard.enter_context(stop))
        for asked, group in recovery.groups(request, world, stop):
            with recovery.surviving():
                _train(asked, group, stop, listen, recovery)
                return


def _train(request: Request, world: World, stop: StopRequest, listen: Callable[[], object], recovery: Recovery) -> None:
    """Meet the other workers, build the parts, choose where to start, train, and keep the record (rank 0).

    `listen` is called where requests to `stop` begin to be heeded.
    """
    prepared = recovery.prepared
    with ExitStack() as stack:
        beginning = stack.enter_context(begun(request, world, prepared, recovery.collectives))
        if prepared.run is None:
            require_room(beginning.parts.model, request.loaded.experiment, request.layout, beginning.collectives.device)
        recovery.require_told_once(beginning.parts)
        # Until here a request to stop ends the process: there is nothing to save, and no trace of the run.
        listen()
        record = stack.enter_context(_open(request, world, beginning, prepared))
        metrics = stack.enter_context(metrics_of(record, beginning.console))
        with record.outcome(), recovery.leaving():
            is_held, checkpoint = _choose_start(beginning, record, recovery)
            callbacks = recovery.same(beginning.parts.callbacks)
            beginning = beginning._replace(parts=replace(beginning.parts, callbacks=callbacks))
            heartbeat = Heartbeat(record.directory.path, world, record.usage)
            with ExitStack() as training:
                job = training.enter_context(job_of(record, beginning, metrics, stop, heartbeat))
                with job.collectives.connecting(job.collectives.uses_nccl):
                    trainer = build_trainer(job)
                stack.callback(recovery.hold, trainer)  # called when the trainer is closed
                stack.enter_context(closing(trainer))
                recovery.await_built(job.collectives)
                _tell(record, trainer)
                if is_held:
                    recovery.go_on(trainer)
                else:
                    _bring_to(checkpoint, trainer, record)
                record.usage.start()
                trainer.train()
            record.finish(trainer, heartbeat.speed())


@contextmanager
def _open(request: Request, world: World, beginning: Beginning, prepared: Prepared) -> Iterator[RunRecord]:
    """The record of the run that rank 0 has chosen, in which a worker tells its caller where the run lies."""
    collectives, console, parts, source, data, fingerprint = beginning
    samples = parts.splits.trained
    chosen = by_rank_0(collectives, lambda: prepared.run or choose_run(request, source, samples, data, world))
    prepared.run = chosen
    origin = Origin(source, data, fingerprint, chosen.weights, chosen.fork)
    if world.local_rank == 0:
        tell_caller(chosen.directory.path)
    if request.resume == "auto" and not (chosen.directory.path / "run.json").exists():
        console.say(f"{request.options.output} has no run that these settings go on with, so a new one begins")
    each = request.loaded.experiment.steps_per_epoch(samples)
    with open_record(collectives, request, chosen.directory, origin, each, console) as record:
        record.usage = prepared.usage = prepared.usage or record.usage
        yield record


def _choose_start(beginning: Beginning, record: RunRecord, recovery: Recovery) -> tuple[bool, Checkpoint | None]:
    """Whether this goes on from a state that ranks hold, else the newest checkpoint, else with the initial weights."""
    collectives, directory = beginning.collectives, record.directory
    is_held = recovery.holds_newest(collectives, directory)
    checkpoint = None if is_held else choose_checkpoint(collectives, directory, beginning.console)
    if record.origin.weights is not None and checkpoint is None and not is_held:
        from ddp_core.record.weights import put_weights

        put_weights(beginning.parts.model, record.origin.weights)
    return is_held, checkpoint


def _bring_to(checkpoint: Checkpoint | None, trainer: Trainer, record: RunRecord) -> None:
    """Say what begins and what has changed, and load the checkpoint; without one, try the loss."""
    job, directory = trainer.job, record.directory
    _announce(trainer, directory)
    for line in record.notes:
        job.console.say(line)
    if checkpoint is not None:
        resume(trainer, checkpoint, directory, is_changed=bool(record.notes))
        return
    if record.world.is_first and next(each_record(directory.metrics), None):
        job.metrics.write("resume", step=0, ranks=record.world.world_size)
    if job.parts.loss not in LOSSES.values():
        from ddp_core.trainers.trial import check_loss

        check_loss(trainer)


def _tell(record: RunRecord, trainer: Trainer) -> None:
    """Let the record know the trainer, and the guard what a rehearsal has found."""
    record.state, record.guard = trainer.state, trainer.guard.figures
    if record.request.rehearsed is not None:
        said, differs = record.request.rehearsed
        record.guard["rehearsal"] = said
        if differs:
            record.mark_broken(0, said)
            trainer.guard.is_broken = True


def _announce(trainer: Trainer, directory: RunDirectory) -> None:
    job, steps = trainer.job, trainer.steps
    say, options = job.console.say, job.options
    say(
        f"{job.experiment.name} on {job.layout.description}, reduction {options.reduction}, "
        f"{steps.total} steps ({steps.per_epoch} per epoch)"
    )
    if job.experiment.precision == "tf32" and not has_tf32(job.device):
        say("precision tf32 needs a GPU of compute capability 8.0 or higher; here it is fp32, which gives other bits")
    if (rules := rules_of(options.numerics)) is not None:
        made = "designed to have the same bits on every x86-64 CPU with AVX2, by this torch and libc"
        say(f"numerics portable (rules {rules}): {made}")
    if job.is_exact and trainer.guard.mode == "off":
        say("guard off: this run does not check that its result does not depend on the layout")
    say(trainer.strategy.batches.cut.describe())
    say(f"run directory {directory.path}")

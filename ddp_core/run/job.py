"""What a worker trains with: the job, what saves, writes and observes for it, and whom it asks for a witness."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from multiprocessing.connection import Client, Connection
from pathlib import Path

from torch import nn

from ddp_core.base.errors import UserError
from ddp_core.checkpoint import Checkpointer, Fence, Ranks, sweep
from ddp_core.distributed.stop import StopRequest
from ddp_core.numerics.limits import rules_of
from ddp_core.observe.heartbeat import Heartbeat
from ddp_core.observe.lost_peers import is_peer_loss
from ddp_core.observe.metrics import Console, MetricsWriter
from ddp_core.observe.step import StepObserver
from ddp_core.record.run_record import RunRecord
from ddp_core.run.beginning import Beginning
from ddp_core.trainers import Job, RunAccess, Trial
from ddp_core.trainers.job import Sums, Testimony

ADDRESS = "DDP_REPEATER"
"""The variable that names the socket of the repeater, which is asked for a witness."""


@contextmanager
def job_of(
    record: RunRecord,
    beginning: Beginning,
    metrics: MetricsWriter,
    stop: StopRequest,
    heartbeat: Heartbeat,
) -> Iterator[Job]:
    """What the trainer is given; what it saves and observes with is closed when the block ends."""
    request, directory, world = record.request, record.directory.path, record.world
    collectives, console, parts = beginning.collectives, beginning.console, beginning.parts
    with (
        _checkpointer(record, console) as checkpointer,
        _observers(record, parts.model, console) as observers,
    ):
        yield Job(
            experiment=request.loaded.experiment,
            layout=request.layout,
            options=request.options,
            parts=parts,
            collectives=collectives,
            console=console,
            metrics=metrics,
            stop=stop,
            run=RunAccess(
                directory=directory,
                checkpointer=checkpointer,
                kept_every=record.begun.kept_every,
                note_kept=record.note_kept if world.is_first else None,
                mark_broken=record.mark_broken,
                witness=OverSocket(directory) if world.is_first else None,
                has_random_data=record.origin.data.sha256 is None,
            ),
            trial=Trial(
                request.asked.miniature, request.asked.only_steps, request.noted_in, request.asked.operations_at
            ),
            observers=[heartbeat, *parts.observers, *observers],
        )


def metrics_of(record: RunRecord, console: Console) -> MetricsWriter:
    """Rank 0's metrics; the other ranks write nothing."""
    if not record.world.is_first:
        return MetricsWriter(None)
    request, directory = record.request, record.directory
    board = None
    if request.options.log_to:
        from ddp_core.observe.tensorboard import TensorBoard

        settings = {"layout": request.layout.label, "reduction": request.options.reduction}
        board = TensorBoard(directory.path, request.loaded.experiment.to_json() | settings, console.warn)
    may_write = record.fence.check if record.fence is not None else lambda: None
    return MetricsWriter(directory.metrics, board, may_write)


@contextmanager
def _checkpointer(record: RunRecord, console: Console) -> Iterator[Checkpointer | None]:
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
            fence = Fence(directory.path, record.begun.token)
        checkpointer = stack.enter_context(
            Checkpointer(
                directory.checkpoints,
                keep_last=options.keep_last,
                keep_every=[each for each in (options.keep_every, record.begun.kept_every) if each is not None],
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
    """Raise the UserError with which a save in the background has failed, if one has."""
    # All ranks leave where one of them cannot save its part. A rank may notice that another one has left before it
    # learns that the save has failed, and a lost peer would not tell the user why.
    try:
        checkpointer.wait()
    except UserError:
        raise
    except Exception:
        return  # the lost peer has ended the save as well


@contextmanager
def _observers(record: RunRecord, model: nn.Module, console: Console) -> Iterator[list[StepObserver]]:
    """The observers that the options ask for: profiler and, always last in a step, scripted faults."""
    options, world, directory = record.request.options, record.world, record.directory.path
    with ExitStack() as stack:
        observers: list[StepObserver] = []
        if options.profile is not None:
            from ddp_core.observe.profiling import StepProfiler

            observers.append(stack.enter_context(StepProfiler(options.profile, directory, world.rank)))
        elif rules_of(options.numerics) is not None and world.is_first and not record.request.is_tried:
            from ddp_core.observe.unknown_operations import UnknownOperations

            observers.append(stack.enter_context(closing(UnknownOperations(console.warn))))
        if options.faults:
            from ddp_core.observe.faults import FaultScript

            observers.append(FaultScript(options.faults, world.rank, directory, model))
        yield observers


class OverSocket:
    """The witness of a run, which the repeater of this machine is; see `Witness` in ddp_core/trainers/job.py."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._connection: Connection | None = None

    def ask(self, step: int, noted: Mapping[int, Sums]) -> None:
        self._connection = None
        # Without the variable, or whoever listens there, no repeater was begun, or it has ended.
        with suppress(OSError, KeyError), ExitStack() as stack:
            connection = stack.enter_context(Client(os.environ[ADDRESS]))
            # A repeater that answers somebody else reads a question later, so it must be short enough to lie there.
            file = Path(os.environ[ADDRESS]).with_name(f"noted-{os.getpid()}-{step}.json")
            file.write_text(json.dumps({number: dict(each) for number, each in noted.items()}), encoding="utf-8")
            connection.send(("witness", (str(self._run.absolute()), step, str(file))))
            stack.pop_all()  # it is closed only where nothing was asked
            self._connection = connection

    def answer(self, seconds: float) -> Testimony | None:
        if self._connection is None:
            return Testimony("none: nobody here could train steps of this run again")
        try:
            return Testimony(*self._connection.recv()) if self._connection.poll(seconds) else None
        except (EOFError, OSError):
            return Testimony("none: its process has ended")

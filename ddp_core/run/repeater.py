"""The process that repeats a run's steps: forked before there are threads, devices or groups, and asked over a socket.

`ddp train` begins it first of all. It rehearses the run, and then waits for rank 0, if that is on this machine, to ask
for a witness. It ends with the process that has begun it, whatever ends that, and removes its folder.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from multiprocessing.connection import Client, Connection
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from ddp_core.base.errors import UserError
from ddp_core.base.process import die_with_parent
from ddp_core.distributed.reports import tell_user
from ddp_core.experiment.request import Request
from ddp_core.model.optimizers import load_for_optimizers
from ddp_core.run.job import ADDRESS
from ddp_core.trainers.job import Testimony

_ENDING_SECONDS = 5.0
_FORK = multiprocessing.get_context("fork")


@contextlib.contextmanager
def vouched_for(request: Request, rehearses: bool) -> Iterator[Request]:
    """A block with the request, rehearsed if it `rehearses`, in which steps of its run can be trained again.

    Raises UserError (2) where the rehearsal has met other bits, unless the run shall go on all the same.
    """
    options = request.options
    is_off = "off" in (options.rehearsal, options.guard) or options.reduction != "exact"
    if is_off or request.evaluated is not None or request.is_tried:
        yield request
        return
    load_for_optimizers()  # every process that is forked from here on needs it
    with _repeater(request):
        if rehearses:
            found = _rehearsed()
            if found.differs and options.on_difference == "stop":
                raise UserError(found.said)
            tell_user(f"warning: {found.said}" if found.differs else found.said)
            request = replace(request, rehearsed=(found.said, found.differs))
        yield request


@contextlib.contextmanager
def _repeater(request: Request) -> Iterator[None]:
    """A block with a process that answers questions about this request, of this process and of its workers."""
    folder = Path(mkdtemp(prefix="ddp-"))
    address, process = str(folder / "repeater"), None
    # What vouches for a run may be missing, and a run goes on without it.
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as listener:
        # Here, so that whoever asks finds it, however long the process takes to begin.
        listener.bind(address)
        listener.listen()
        process = _FORK.Process(target=_serve, args=(request, listener, folder))
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.environ[ADDRESS] = address
    try:
        yield
    finally:
        os.environ.pop(ADDRESS, None)
        if process is not None and process.pid is not None:
            process.terminate()
            process.join(_ENDING_SECONDS)
            process.kill()
            process.join()
        shutil.rmtree(folder, ignore_errors=True)


def _rehearsed() -> Testimony:
    try:
        with Client(os.environ[ADDRESS]) as connection:
            connection.send(("rehearse", ()))
            return Testimony(*connection.recv())
    except (EOFError, OSError):
        return Testimony("not rehearsed: the process that does it has ended, or could not be begun")


def _serve(request: Request, listener: socket.socket, folder: Path) -> None:
    """Answer one question after the other, until the process that has begun this one ends or says so."""
    # The process that trains needs neither.
    from ddp_core.run.rehearsal import rehearse, witnessed

    answers: Mapping[str, Callable[..., Testimony]] = {"rehearse": rehearse, "witness": witnessed}
    os.setsid()  # so that a terminal's Ctrl-C does not reach it

    def leave(*_: Any) -> None:
        # What still writes there would leave a folder behind.
        for child in multiprocessing.active_children():
            child.kill()
            child.join()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, leave)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    die_with_parent(signal.SIGTERM)
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:
        leave()
    with open(os.devnull, "w") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 1)
    sys.stdout = sys.__stdout__
    while True:
        client, _ = listener.accept()
        with contextlib.suppress(EOFError, OSError), Connection(client.detach()) as connection:
            kind, words = connection.recv()
            try:
                answer: tuple[Any, ...] = answers[kind](request, folder, *words)
            except Exception as error:
                answer = (f"none, since this failed: {type(error).__name__}: {' '.join(str(error).split())}", False)
            connection.send(tuple(answer))

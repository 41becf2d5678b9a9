"""The process that repeats a run's steps: forked before there are threads, devices or groups, and asked over a socket.

`ddp train` begins it first of all. It rehearses the run, and then waits for rank 0, if that is on this machine, to ask
for a witness. It ends with the process that has begun it, whatever ends that, and removes its folder.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from ddp_core.base.errors import UserError
from ddp_core.base.process import die_with_parent
from ddp_core.base.torch_internals import LOADED_BY_OPTIMIZERS
from ddp_core.distributed.reports import tell_user
from ddp_core.experiment.request import Request
from ddp_core.trainers.noting import Sums
from ddp_core.trainers.witness import Testimony

_ADDRESS = "DDP_REPEATER"
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
    # Every process that is forked from here on needs it.
    importlib.import_module(LOADED_BY_OPTIMIZERS)
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
    address = str(folder / "repeater")
    with socket.socket(socket.AF_UNIX) as listener:
        # Here, so that whoever asks finds it, however long the process takes to begin.
        listener.bind(address)
        listener.listen()
        process = _FORK.Process(target=_serve, args=(request, listener, folder))
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.environ[_ADDRESS] = address
    try:
        yield
    finally:
        os.environ.pop(_ADDRESS, None)
        process.terminate()
        process.join(_ENDING_SECONDS)
        process.kill()
        process.join()
        shutil.rmtree(folder, ignore_errors=True)


def _rehearsed() -> Testimony:
    try:
        with _connected() as connection:
            connection.send(("rehearse", ()))
            return Testimony(*connection.recv())
    except (EOFError, OSError):
        return Testimony("not rehearsed: its process has ended")


def _connected() -> Connection:
    """Raises OSError where there is no repeater."""
    address = os.environ.get(_ADDRESS)
    if address is None:
        raise FileNotFoundError("no repeater was begun")
    client = socket.socket(socket.AF_UNIX)
    client.connect(address)
    return Connection(client.detach())


class OverSocket:
    """The witness of a run, which the repeater of this machine is; see `Witness` in ddp_core/trainers/witness.py."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._connection: Connection | None = None

    def ask(self, step: int, noted: Mapping[int, Sums]) -> None:
        with contextlib.suppress(OSError):
            self._connection = _connected()
            # A repeater that answers somebody else reads a question later, so it must be short enough to lie there.
            file = Path(os.environ[_ADDRESS]).with_name(f"noted-{os.getpid()}-{step}.json")
            file.write_text(json.dumps({number: dict(each) for number, each in noted.items()}), encoding="utf-8")
            self._connection.send(("witness", (str(self._run.absolute()), step, str(file))))

    def answer(self, seconds: float) -> Testimony | None:
        if self._connection is None:
            return Testimony("none: nobody here could train steps of this run again")
        try:
            return Testimony(*self._connection.recv()) if self._connection.poll(seconds) else None
        except (EOFError, OSError):
            return Testimony("none: its process has ended")


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

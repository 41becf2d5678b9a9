"""How a run's rank 0 asks the repeater of its machine for a witness."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

from ddp_core.trainers.job import Sums, Testimony

ADDRESS = "DDP_REPEATER"
"""The variable that names the repeater's socket."""


def connected() -> Connection:
    """Raises OSError where there is no repeater."""
    address = os.environ.get(ADDRESS)
    if address is None:
        raise FileNotFoundError("no repeater was begun")
    client = socket.socket(socket.AF_UNIX)
    client.connect(address)
    return Connection(client.detach())


class OverSocket:
    """The witness of a run, which the repeater of this machine is; see `Witness` in ddp_core/trainers/job.py."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._connection: Connection | None = None

    def ask(self, step: int, noted: Mapping[int, Sums]) -> None:
        self._connection = None
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            connection = stack.enter_context(connected())
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

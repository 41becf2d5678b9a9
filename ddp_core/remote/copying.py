"""Copy what is committed in run directories to a store while they grow: data, then manifests, and records last."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddp_core.base.beneath import read_file
from ddp_core.base.documents import BadDocument
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import is_there
from ddp_core.base.process import make_patient
from ddp_core.base.refusals import human_bytes, refused
from ddp_core.distributed.reports import tell_user
from ddp_core.remote.address import Address, put, reaching
from ddp_core.remote.files import RECORD, Copies, Stat, committed, data_of, is_ahead, is_manifest, stat_of, turn_of

_LOOK_SECONDS = 1.0
_LONGEST_PAUSE = 30.0
_PATIENCE_SECONDS = 120.0
"""So long a copier tries on after its run has ended, since the last time that something arrived."""
_NICENESS = 10


class Superseded(UserError):
    """The run was continued from the store on another machine, in an attempt that is not known here."""


class RunCopier:
    """Copies one run to its address; a pass of it that is killed is made good by the next."""

    def __init__(self, store: Any, path: str, run: Path, address: Address) -> None:
        self._store, self._path, self.run, self.address = store, path, run, address
        self._done: tuple[object, ...] | None = None
        self.arrived, self.bytes = 0, 0
        """Files of this run that this process has copied, and what they hold."""

    def _signs(self) -> tuple[object, ...]:
        """What changes with each save, and where the run begins or ends."""
        folder = self.run / "checkpoints"
        with contextlib.suppress(FileNotFoundError):
            files = sorted(file for file in folder.iterdir() if file.suffix == ".json")
            return stat_of(self.run / RECORD), tuple((file.name, stat_of(file)) for file in files)
        return ()

    def copy(self, whole: bool = False) -> bool:
        """One pass over the run, where it has changed since the last one or is to be copied as a `whole`.

        Returns whether the store has all of it. Raises UserError.
        """
        signs = self._signs()
        if not signs or (signs == self._done and not whole):
            return True
        with Copies.of(self.run, self.address.text) as copies:
            # Read first: all that it speaks of is on the disk by then, and so arrives before it.
            stat, record = stat_of(self.run / RECORD), read_file(self.run / RECORD)
            files = committed(self.run) | {RECORD: stat}
            new = [name for name in files if copies.files.get(name) != files[name]]
            gone = [name for name in copies.files if not is_there(self.run / name)]
            if new or gone:
                self._require_ours(record)
            for name in new:
                if not self._put(name, files[name], record):
                    return False
                copies.note(name, files[name])
            for name in sorted(gone, key=turn_of, reverse=True):
                with contextlib.suppress(FileNotFoundError), reaching(self.address, lets_through=FileNotFoundError):
                    self._store.rm_file(f"{self._path}/{name}")
                copies.forget(name)
        self._done = signs
        return True

    def _require_ours(self, record: bytes) -> None:
        try:
            with reaching(self.address, lets_through=FileNotFoundError):
                there = bytes(self._store.cat_file(f"{self._path}/{RECORD}"))
        except FileNotFoundError:
            return
        with contextlib.suppress(BadDocument):
            if is_ahead(record, there):
                return
        raise Superseded(
            f"{self.address.text} was continued on another machine, so nothing of this one's is copied there any more; "
            f"what is here stays in {self.run}",
            ExitCode.PEERS_LOST,
        )

    def _put(self, name: str, stat: Stat, record: bytes) -> bool:
        """Copy one file; returns whether the store has it now. A manifest waits for all that it names."""
        path, file, size = f"{self._path}/{name}", self.run / name, stat[0]
        if name == RECORD:
            with reaching(self.address):
                self._store.pipe_file(path, record)
        else:
            try:
                if is_manifest(name):
                    wanted = {f"{self._path}/{each}": part["bytes"] for each, part in data_of(read_file(file)).items()}
                    if any(self._size(each) != bytes_ for each, bytes_ in wanted.items()):
                        return False
                with reaching(self.address):
                    put(self._store, path, file, size)
            except (UserError, FileNotFoundError):
                if not is_there(file):
                    return False  # an old checkpoint was removed meanwhile: the next pass sees what is left
                raise
            if self._size(path) != size:
                raise UserError(f"{self.address.text}/{name} has not arrived whole", ExitCode.RESOURCES)
        self.arrived, self.bytes = self.arrived + 1, self.bytes + size
        return True

    def _size(self, path: str) -> int | None:
        try:
            with reaching(self.address, lets_through=FileNotFoundError):
                return int(self._store.info(path)["size"])
        except FileNotFoundError:
            return None


class Copier:
    """Copies all runs at or below a folder to an address, until it is told that no more come."""

    def __init__(self, folder: Path, address: Address, patience: float = _PATIENCE_SECONDS) -> None:
        self._folder, self._address, self._patience = folder, address, patience
        self._store, self._path = address.store()
        self._runs: dict[Path, RunCopier] = {}
        self._superseded: dict[Path, Superseded] = {}
        self._began = time.time_ns()

    def follow(self, is_ended: Callable[[float], bool]) -> int:
        """Copy what is committed each second, and at the end all that is left; returns an exit code.

        `is_ended` is asked whether that is now, and may take so many seconds to answer. A store that cannot be reached
        is tried again, in ever longer pauses; after the end, no longer than the patience lasts.
        """
        pause, last, is_over, told = _LOOK_SECONDS, time.monotonic(), False, ""
        while True:
            is_over = is_over or is_ended(pause)
            before = self._arrived
            problem = self._pass(is_over)
            if problem is None:
                if is_over:
                    return self._tell()
                pause, last, told = _LOOK_SECONDS, time.monotonic(), ""
                continue
            if self._arrived > before or not is_over:
                last = time.monotonic()
            if is_over and time.monotonic() - last > self._patience:
                raise UserError(
                    f"{problem}. What is saved is whole in {self._folder}; copy it again with `python -m "
                    f"ddp_core.remote copy {self._folder} {self._address.text}`",
                    ExitCode.RESOURCES,
                )
            if str(problem) != told:
                told = str(problem)
                tell_user(f"warning: not copied yet: {told}")
            pause = min(2 * pause, _LONGEST_PAUSE)
            if is_over:
                time.sleep(min(pause, self._patience / 4))

    @property
    def _arrived(self) -> int:
        return sum(run.arrived for run in self._runs.values())

    def _pass(self, whole: bool) -> UserError | None:
        """Copy what is new of all runs; returns the first error after which it is to be tried again."""
        for record in [self._folder / RECORD, *self._folder.glob(f"*/{RECORD}"), *self._folder.glob(f"*/*/{RECORD}")]:
            if record.parent not in self._runs and is_there(record):
                name = "" if record.parent == self._folder else record.parent.relative_to(self._folder).as_posix()
                path = f"{self._path}/{name}".rstrip("/")
                self._runs[record.parent] = RunCopier(self._store, path, record.parent, self._address / name)
        problem: UserError | None = None
        for run, copier in self._runs.items():
            if run in self._superseded:
                continue
            try:
                if not copier.copy(whole) and whole:
                    problem = problem or UserError(f"{copier.address.text} lacks files that a manifest names")
            except Superseded as error:
                self._superseded[run] = error
                tell_user(f"error: {error}")
            except UserError as error:
                problem = problem or error
            except OSError as error:
                if is_there(run / RECORD):  # else somebody removes the run
                    problem = problem or refused(error, run)
        return problem

    def _tell(self) -> int:
        """Say what the store has; returns 6 where a run that has gone on since this began was continued elsewhere."""
        for run, copier in self._runs.items():
            if copier.arrived and run not in self._superseded:
                files = f"{copier.arrived} files, {human_bytes(copier.bytes)}, copied now"
                tell_user(f"{copier.address.text} has all of the run ({files})")
        lost = [error for run, error in self._superseded.items() if stat_of(run / RECORD)[1] > self._began]
        return lost[0].exit_code if lost else ExitCode.DONE


def main(folder: Path, address: Address, follows: bool, patience: float = _PATIENCE_SECONDS) -> int:
    """Copy until standard input ends, or without `follows` once; returns an exit code.

    Signals to stop are for the training: what it saves then is still to be copied.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if follows else ():
        signal.signal(number, signal.SIG_IGN)
    make_patient()  # where nobody is left who reads what it says
    os.nice(_NICENESS)
    return Copier(folder, address, patience).follow(_input_ended if follows else lambda seconds: True)


def _input_ended(seconds: float) -> bool:
    return bool(select.select([sys.stdin], [], [], seconds)[0])

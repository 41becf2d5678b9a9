"""The files of a run as they lie in a store: in which sequence they go there, and what says which of them there are."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from typing_extensions import TypedDict

from ddp_core.base.beneath import open_beneath, open_file, read_file
from ddp_core.base.documents import BadDocument, Count, json_text, parse_document, read_document, require_kind
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import replace_file, take_lock, target_of

RECORD = "run.json"
COPIED = "copied.json"
_FORMAT = "ddp-copied/1"
_LOCK = "copied.lock"
_PATIENCE_SECONDS = 600.0
"""So long another process may copy what this one is to copy."""
_CHECKPOINTS = "checkpoints/"
_OF_THIS_MACHINE = ("run.lock", "fence.json", "fence.lock", "heartbeats", COPIED, _LOCK)
"""What tells of processes here."""

Stat = tuple[int, int]
"""The size of a file, and when it was written, in nanoseconds."""


class Part(TypedDict):
    """What a manifest says of a data file."""

    file: str
    bytes: Count
    sha256: str


class _Attempt(TypedDict):
    started_at: str


class _Record(TypedDict):
    attempts: list[_Attempt]


def is_manifest(name: str) -> bool:
    """Whether this is the manifest of a checkpoint."""
    return name.startswith(f"{_CHECKPOINTS}step-") and name.endswith(".json")


def is_data(name: str) -> bool:
    """Whether this is a data file of a checkpoint, which is worth nothing without its manifest."""
    return name.startswith(f"{_CHECKPOINTS}step-") and name.endswith(".pt")


def data_of(manifest: bytes) -> dict[str, Part]:
    """The data files that a manifest names. Raises BadDocument."""
    document = parse_document(manifest, dict[str, object])
    found = require_kind(document.get("parts") or [document], list[Part])
    if any("/" in part["file"] for part in found):
        raise BadDocument("it names a file in another folder")
    return {f"{_CHECKPOINTS}{part['file']}": part for part in found}


def turn_of(name: str) -> int:
    """When a file is copied: after all that it speaks of."""
    if name == RECORD:
        return 4
    if is_manifest(name):
        return 2
    if name in (f"{_CHECKPOINTS}latest.json", f"{_CHECKPOINTS}best.json"):
        return 3
    return 0 if is_data(name) else 1


def is_ahead(here: bytes, there: bytes) -> bool:
    """Whether the run.json `here` knows each attempt that is known `there`: else somebody else has continued the run.

    Raises BadDocument.
    """
    known, attempts = (parse_document(record, _Record)["attempts"] for record in (here, there))
    return [each["started_at"] for each in known[: len(attempts)]] == [each["started_at"] for each in attempts]


def stat_of(path: Path) -> Stat:
    """The size and the time of a file. Raises OSError."""
    found = path.lstat()
    return found.st_size, found.st_mtime_ns


def committed(run: Path) -> dict[str, Stat]:
    """The files of a run that a store is to have, in the sequence in which they are copied."""
    found: dict[str, Stat] = {}
    named = set[str]()
    for name, path in _files(run, ""):
        # Old checkpoints are removed meanwhile, and a damaged manifest commits nothing.
        with contextlib.suppress(FileNotFoundError, BadDocument):
            if is_manifest(name):
                named |= data_of(read_file(path)).keys()
            found[name] = stat_of(path)
    names = [name for name in found if not is_data(name) or name in named]
    return {name: found[name] for name in sorted(names, key=lambda name: (turn_of(name), name))}


def _files(folder: Path, prefix: str) -> Iterator[tuple[str, Path]]:
    for entry in folder.iterdir():
        if (not prefix and entry.name in _OF_THIS_MACHINE) or target_of(entry.name) is not None or entry.is_symlink():
            continue
        if entry.is_dir():
            yield from _files(entry, f"{prefix}{entry.name}/")
        elif entry.is_file():
            yield f"{prefix}{entry.name}", entry


def is_worked_in(run: Path) -> bool:
    """Whether a process trains in this run directory now."""
    with contextlib.suppress(OSError), open_file(run / "run.lock") as lock:
        return not take_lock(lock.fileno(), shared=True)
    return False


@contextlib.contextmanager
def alone(descriptor: int, where: Path) -> Iterator[None]:
    """A block that one process at a time is in, by the lock of this open file, which is closed at its end.

    Raises UserError (4) where another one does not leave it.
    """
    try:
        if not take_lock(descriptor, patience=_PATIENCE_SECONDS):
            raise UserError(f"{where} is being copied by another process; wait for it", ExitCode.RESOURCES)
        yield
    finally:
        os.close(descriptor)


class _Document(TypedDict):
    address: str
    files: dict[str, list[Count]]


class Copies:
    """What `copied.json` of a run says: which of its files the store has, as they were when they were copied."""

    def __init__(self, run: Path, address: str) -> None:
        self._run, self._address = run, address
        self.files: dict[str, Stat] = {}
        with contextlib.suppress(OSError, BadDocument):
            known = read_document(run / COPIED, _Document, _FORMAT)
            if known["address"] == address:
                self.files = {name: (size, time) for name, (size, time) in known["files"].items()}

    @classmethod
    @contextlib.contextmanager
    def of(cls, run: Path, address: str) -> Iterator[Copies]:
        """Those of a run, which no other process copies in the block. Raises UserError (4) where one does not end."""
        with alone(open_beneath(run / _LOCK, os.O_RDWR | os.O_CREAT), run):
            yield cls(run, address)

    def note(self, name: str, stat: Stat | None = None) -> None:
        """The store has this file as it was when it had this `stat`, by default as it is now."""
        with contextlib.suppress(FileNotFoundError):
            self.files[name] = stat or stat_of(self._run / name)
            self._write()

    def forget(self, name: str) -> None:
        """The store has the file no more."""
        del self.files[name]
        self._write()

    def _write(self) -> None:
        document = {"format": _FORMAT, "address": self._address, "files": self.files}
        replace_file(self._run / COPIED, json_text(document) + "\n")

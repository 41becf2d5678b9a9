"""Bring runs from a store into local folders: what is committed there, each checkpoint whole or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from ddp_core.base.beneath import read_file
from ddp_core.base.documents import BadDocument
from ddp_core.base.errors import UserError
from ddp_core.base.files import NewFile, is_there, sha256_of
from ddp_core.base.refusals import refused
from ddp_core.distributed.reports import tell_user
from ddp_core.remote.address import PIECE, Address, reaching
from ddp_core.remote.files import (
    COPIED,
    RECORD,
    Copies,
    Part,
    alone,
    data_of,
    is_ahead,
    is_data,
    is_manifest,
    is_worked_in,
    turn_of,
)

_WEIGHTS = ".safetensors"


def bring(address: Address, *, writes: bool, records_only: bool = False) -> Path:
    """Bring what the address names, and return where it lies now: a run, a folder of runs, a checkpoint or a bundle.

    `writes`: into the folder where runs for this address are trained; a run there stays as it is, but for what it
    lacks, where nobody else has continued it. Else into a copy, which becomes just what the store has. `records_only`:
    no weights. Raises UserError (2) where there is no run, and (4) where the store or the disk refuses something.
    """
    place = address.written if writes else address.copied
    with reaching(address):
        store, path = address.store()
        is_file = store.isfile(path)
    try:
        if not is_file:
            _bring_runs(store, path, address, place, writes, records_only)
        elif address.name.startswith("step-"):
            bring(address.parent.parent, writes=writes)
        else:
            _Source(store, address).fetch(path, place)
    except OSError as error:
        raise refused(error, place) from None
    return place


def _bring_runs(store: Any, path: str, address: Address, place: Path, writes: bool, records_only: bool) -> None:
    with reaching(address):
        listed = store.find(path, detail=True)
    sizes = {str(PurePosixPath(name).relative_to(path)): int(info["size"]) for name, info in listed.items()}
    if strange := [name for name in sizes if ".." in name.split("/")]:
        raise UserError(f"{address.text}: a file there is named {strange[0]!r}, so nothing is brought from there")
    runs = [PurePosixPath(name).parent for name in sizes if PurePosixPath(name).name == RECORD]
    if not runs and not writes:
        raise UserError(f"{address.text}: no run is there (nothing with a {RECORD})")
    place.mkdir(parents=True, exist_ok=True)
    if not writes:
        _forget_runs(place, [place / run for run in runs])
    for run in sorted(runs):
        name = "" if run == PurePosixPath() else str(run)
        source = _Source(store, address / name)
        files = {
            str(PurePosixPath(file).relative_to(run)): size
            for file, size in sizes.items()
            if PurePosixPath(file).is_relative_to(run)
        }
        root, here = str(PurePosixPath(path) / run), place / name
        here.mkdir(parents=True, exist_ok=True)
        # The ranks of a launcher outside each bring it.
        with alone(os.open(here.parent, os.O_RDONLY), here):
            if not writes:
                _copy_run(source, root, here, files, records_only)
            elif not is_worked_in(here):  # else its own copier tells whether it was continued elsewhere
                _complete_run(source, root, here, files, records_only)


def _forget_runs(place: Path, runs: Sequence[Path]) -> None:
    """Remove from a copy the runs that the store has no more."""
    for record in list(place.glob(f"**/{RECORD}")):
        if record.parent not in runs and is_there(record.with_name(COPIED)):
            shutil.rmtree(record.parent)


def _complete_run(source: _Source, root: str, here: Path, files: Mapping[str, int], records_only: bool) -> None:
    """Bring what the run that is trained `here` lacks; all of it where somebody else has continued it."""
    if is_there(here / RECORD):
        try:
            is_ours = is_ahead(read_file(here / RECORD), source.read(f"{root}/{RECORD}"))
        except BadDocument as error:
            raise UserError(f"{source.address.text}: its {RECORD} there or in {here} is damaged: {error}") from None
        if is_ours:
            files = {name: size for name, size in files.items() if not is_there(here / name)}
        else:
            aside = source.address.superseded
            aside.parent.mkdir(parents=True, exist_ok=True)
            here.rename(aside)
            here.mkdir()
            tell_user(f"{source.address.text} was continued on another machine; what was here of it is in {aside} now")
    _copy_run(source, root, here, files, records_only, stays=True)


def _copy_run(
    source: _Source, root: str, here: Path, files: Mapping[str, int], records_only: bool, stays: bool = False
) -> None:
    """Make the run `here` what the store has at `root`, in files of these sizes; what it has no more goes, or `stays`.

    A file whose size and whose record, or whose digest, are those of the store is not copied again.
    """
    with Copies.of(here, source.address.text) as copies:
        parts: dict[str, Part] = {}
        manifests: dict[str, bytes] = {}
        for name in filter(is_manifest, () if records_only else files):
            with suppress(FileNotFoundError, BadDocument):  # removed since they were listed, or of no use
                content = source.read(f"{root}/{name}")
                parts |= data_of(content)
                manifests[name] = content
        wanted = [name for name in files if name in parts or name in manifests or not _is_of_checkpoint(name)]
        if not stays:
            _forget(here, wanted)
        record = source.read(f"{root}/{RECORD}") if RECORD in files else None
        is_same = is_there(here / RECORD) and read_file(here / RECORD) == record
        for name in sorted(wanted, key=turn_of):
            target = here / name
            if name == RECORD or (records_only and name.endswith(_WEIGHTS)):
                continue
            if name in manifests:
                if all(is_there(here / each) for each in data_of(manifests[name])):
                    source.write(target, manifests[name])
            elif name in parts:
                source.fetch_data(f"{root}/{name}", target, parts[name])
            elif not (is_same and is_there(target) and target.stat().st_size == files[name]):
                source.fetch(f"{root}/{name}", target)
            copies.note(name)
        if record is not None:
            source.write(here / RECORD, record)
            copies.note(RECORD)


def _is_of_checkpoint(name: str) -> bool:
    return is_manifest(name) or is_data(name)


def _forget(here: Path, wanted: Sequence[str]) -> None:
    """Remove from a copy the checkpoints that the store has no more, manifests first."""
    for file in sorted(here.glob("checkpoints/step-*"), key=lambda file: file.suffix):
        if f"checkpoints/{file.name}" not in wanted:
            file.unlink()


class _Source:
    """The store, as far as it is read; what it refuses is a UserError (4), and what it has not FileNotFoundError."""

    def __init__(self, store: Any, address: Address) -> None:
        self._store, self.address = store, address

    def read(self, path: str) -> bytes:
        """The content of a small file."""
        with reaching(self.address, lets_through=FileNotFoundError):
            return bytes(self._store.cat_file(path))

    def fetch(self, path: str, target: Path) -> str:
        """Copy a file, and return its SHA-256."""
        digest = hashlib.sha256()
        with reaching(self.address, lets_through=FileNotFoundError):
            source = self._store.open(path, "rb", block_size=PIECE)
        target.parent.mkdir(parents=True, exist_ok=True)
        with source, NewFile(target) as new:
            while piece := self._piece(source):
                digest.update(piece)
                new.write(piece)
            new.sync()
            new.rename()
        return digest.hexdigest()

    def _piece(self, source: Any) -> bytes:
        with reaching(self.address):
            return bytes(source.read(PIECE))

    def fetch_data(self, path: str, target: Path, part: Part) -> None:
        """Copy a data file, unless it is there; not where it is another than its manifest says, which is told."""
        if is_there(target) and target.stat().st_size == part["bytes"] and sha256_of(target) == part["sha256"]:
            return
        with suppress(FileNotFoundError):  # an old checkpoint, removed since it was listed
            found = self.fetch(path, target)
            if found != part["sha256"]:
                target.unlink()
                tell_user(
                    f"warning: {self.address.text}/checkpoints/{target.name} has SHA-256 {found[:12]}…, its manifest "
                    f"says {part['sha256'][:12]}…: this checkpoint is left out"
                )

    def write(self, target: Path, content: bytes) -> None:
        """Write a small file that was read."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with NewFile(target) as new:
            new.write(content)
            new.sync()
            new.rename()

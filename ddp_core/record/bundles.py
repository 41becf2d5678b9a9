"""What a user names where a run is wanted: its directory, a checkpoint of it, or a bundle, checked and unpacked here.

A bundle (format `ddp-bundle/1`, which is the zip file's comment) is a zip file whose members are stored as they are,
without compression, by sorted names and with one fixed time: the same run gives the same bytes. MANIFEST has the
SHA-256 of each other member, as `sha256sum --check` reads it.

A bundle may come from a stranger. So nothing of it is unpacked before all of it is checked: names, sizes, digests.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from ddp_core.base.beneath import MOST_BYTES
from ddp_core.base.documents import parse_document
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import is_file, is_there
from ddp_core.base.refusals import is_lack, refused
from ddp_core.base.shown import shown
from ddp_core.record.directory import RunDirectory, shown_record
from ddp_core.record.run_json import MOST_RECORD_BYTES, RecordedRun

BUNDLE_FORMAT = "ddp-bundle/1"
MANIFEST = "MANIFEST"
PINS = "pins.txt"
_MOST_MEMBERS = 10_000
_CHECKPOINT = "step-"
"""How the names of a checkpoint's files begin."""


class ChangedBundle(Exception):
    """A member is not what was packed; the message says which."""


class Unpacked(NamedTuple):
    """What an unpacked bundle says of itself."""

    files: int
    record: RecordedRun
    pins: str
    """The packages of the run, as `pip install -r` takes them."""


def unpack_bundle(file: Path, folder: Path) -> Unpacked:
    """Unpack the bundle into the folder, once each member is known to be as it was packed.

    Raises ChangedBundle where one is not; UserError for what is no bundle or could do harm, and (4) for a full disk.
    """
    try:
        with ZipFile(file) as archive:
            members = _safe_members(file, archive)
            if changed := _changed(archive, members):
                raise ChangedBundle(changed)
            record = shown_record(parse_document(_text(archive, "run.json", MOST_RECORD_BYTES), RecordedRun))
            told = Unpacked(len(members), record, _text(archive, PINS))
            archive.extractall(folder)
    except (BadZipFile, RuntimeError, EOFError, KeyError, ValueError, struct.error) as error:
        raise UserError(f"{file} is not a bundle, or is damaged: {error}") from None
    except OSError as error:
        if is_lack(error):
            raise refused(error, folder) from None
        raise UserError(f"{file} cannot be unpacked: {error.strerror}") from None
    return told


def _safe_members(file: Path, archive: ZipFile) -> list[ZipInfo]:
    """The members. Raises UserError where unpacking them could write elsewhere, or more than the file's own size."""
    members = archive.infolist()
    if archive.comment != BUNDLE_FORMAT.encode():
        raise UserError(f"{file} is a zip file, but not a bundle of format {BUNDLE_FORMAT}")
    if len(members) > _MOST_MEMBERS:
        raise UserError(f"{file} is refused: {len(members)} files are more than any bundle has")
    for member in members:
        path = PurePosixPath(member.filename)
        if path.is_absolute() or ".." in path.parts or "\\" in member.filename or str(path) != member.filename:
            raise UserError(
                f"{file} is refused: {shown(member.filename)} leads out of the folder that it is unpacked into"
            )
        if member.compress_type != ZIP_STORED or member.file_size != member.compress_size:
            raise UserError(f"{file} is refused: {shown(member.filename)} is compressed, as in no bundle")
    if len({member.filename for member in members}) < len(members):
        raise UserError(f"{file} is refused: it holds two files of one name")
    if sum(member.file_size for member in members) > file.stat().st_size:
        raise UserError(f"{file} is refused: unpacked, it would be larger than the file")
    return members


def _changed(archive: ZipFile, members: list[ZipInfo]) -> str | None:
    """What is wrong with the first member that differs from MANIFEST; None where each is as MANIFEST says."""
    lines = _text(archive, MANIFEST).splitlines()
    named = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    here = {member.filename for member in members} - {MANIFEST}
    for name in sorted(here | named.keys()):
        if name not in named:
            return f"{name} is not in MANIFEST"
        if name not in here:
            return f"{name} is missing"
        if _digest(archive, name) != named[name]:
            return f"{name} was changed after the bundle was made"
    return None


def _digest(archive: ZipFile, name: str) -> str | None:
    try:
        with archive.open(name) as member:
            return hashlib.file_digest(member, "sha256").hexdigest()  # type: ignore[arg-type]
    except BadZipFile:  # the zip file's own checksum differs
        return None


def _text(archive: ZipFile, name: str, most_bytes: int = MOST_BYTES) -> str:
    if archive.getinfo(name).file_size > most_bytes:
        raise ValueError(f"{name} is too large")
    return archive.read(name).decode()


class Place(NamedTuple):
    """A run, and of it the one checkpoint that was named."""

    run: RunDirectory
    name: str
    """The name of the run's directory, or of the bundle without its suffix."""
    checkpoint: Path | None = None
    """The manifest or a data file."""


@contextmanager
def place_named(named: str | os.PathLike[str]) -> Iterator[Place]:
    """The run and the checkpoint that a path means; a bundle is checked, and unpacked for the block."""
    from ddp_core.remote import brought

    path = brought(named)
    if path.is_dir():
        yield Place(RunDirectory(path.absolute()), path.absolute().name)
    elif not is_file(path):
        raise UserError(f"{path} is not there; give a run directory, a checkpoint of a run, or a bundle")
    elif path.name.startswith(_CHECKPOINT):
        run = RunDirectory(path.absolute().parents[1])
        if not is_there(run.path / "run.json"):
            raise UserError(
                f"{path} lies in no run directory, so nothing tells which model its weights are of; "
                "ddp_core.load reads it without a model"
            )
        yield Place(run, run.path.name, path)
    else:
        with TemporaryDirectory(prefix="ddp-bundle-") as folder:
            try:
                unpack_bundle(path, Path(folder))
            except ChangedBundle as changed:
                raise UserError(f"{path}: {changed}; get the bundle anew", ExitCode.NO_CHECKPOINT) from None
            yield Place(RunDirectory(Path(folder)), path.stem)

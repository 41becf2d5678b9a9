"""`ddp verify BUNDLE`: is each member the one that was packed, and does training again give the same weights?

A bundle may come from a stranger. So nothing of it is unpacked before all of it is checked: names, sizes, digests.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

from ddp_core.base.errors import UserError, is_full, no_room
from ddp_core.cli.bundle import FORMAT, MANIFEST, PINS
from ddp_core.cli.verify import DIFFERENT, verify
from ddp_core.config.layout import LayoutKind
from ddp_core.record.environment import package_differences

_MOST_MEMBERS = 10_000
_MOST_TEXT = 2**26
"""Bytes of a member that is read into memory as a whole."""


def verify_bundle(
    file: Path, layout: LayoutKind | None, device: str | None, nproc_per_node: int | None, data_dir: str | None
) -> int:
    """Check the bundle's members, say how packages differ, then verify the run; the exit code is that of `verify`.

    Raises UserError for a file that is no bundle or that could do harm when unpacked, and (4) for a full disk.
    """
    with TemporaryDirectory(prefix="ddp-bundle-") as folder:
        if not _unpack_checked(file, Path(folder)):
            return DIFFERENT
        print("this runs the code in the bundle", flush=True)
        return verify(Path(folder), layout, device, nproc_per_node, data_dir)


def _unpack_checked(file: Path, folder: Path) -> bool:
    """Unpack the bundle, if all of it is as it was packed; say so, and how packages differ."""
    try:
        with ZipFile(file) as archive:
            members = _safe_members(file, archive)
            changed = _changed(archive, members)
            if changed:
                print(f"different bundle: {changed}. Nothing was trained.")
                return False
            record = json.loads(_text(archive, "run.json"))
            print(f"bundle: {len(members)} files, each as MANIFEST says")
            print(f"packages: {package_differences(_text(archive, PINS), record['environment'])}")
            _unpack(archive, members, folder)
    except (BadZipFile, NotImplementedError, EOFError, KeyError, ValueError) as error:
        raise UserError(f"{file} is not a bundle, or is damaged: {error}") from None
    except OSError as error:
        if is_full(error):
            raise no_room(folder.parent, error) from None
        raise UserError(f"{file} cannot be unpacked: {error.strerror}") from None
    return True


def _safe_members(file: Path, archive: ZipFile) -> list[ZipInfo]:
    """The members. Raises UserError where unpacking them could write elsewhere, or more than the file's own size."""
    members = archive.infolist()
    if archive.comment != FORMAT.encode():
        raise UserError(f"{file} is a zip file, but not a bundle of format {FORMAT}")
    if len(members) > _MOST_MEMBERS:
        raise UserError(f"{file} is refused: {len(members)} files are more than any bundle has")
    for member in members:
        path = PurePosixPath(member.filename)
        if path.is_absolute() or ".." in path.parts or "\\" in member.filename or str(path) != member.filename:
            raise UserError(f"{file} is refused: {member.filename!r} leads out of the folder that it is unpacked into")
        if member.compress_type != ZIP_STORED or member.file_size != member.compress_size:
            raise UserError(f"{file} is refused: {member.filename} is compressed, as in no bundle")
    if len({member.filename for member in members}) < len(members):
        raise UserError(f"{file} is refused: it holds two files of one name")
    if sum(member.file_size for member in members) > file.stat().st_size:
        raise UserError(f"{file} is refused: unpacked, it would be larger than the file")
    return members


def _changed(archive: ZipFile, members: list[ZipInfo]) -> str | None:
    """Which member is not the one that MANIFEST names, None where all are."""
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


def _text(archive: ZipFile, name: str) -> str:
    if archive.getinfo(name).file_size > _MOST_TEXT:
        raise ValueError(f"{name} is too large")
    return archive.read(name).decode()


def _unpack(archive: ZipFile, members: list[ZipInfo], folder: Path) -> None:
    for member in members:
        place = folder / member.filename
        place.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(member) as source, place.open("xb") as target:
            shutil.copyfileobj(source, target, 1 << 20)

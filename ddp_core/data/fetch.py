"""Fetch published data sets into the data directory: only on request, never during training.

Files and checksums are those of torchvision's data set classes, and so is the layout on disk: data that torchvision has
downloaded is found here, and the other way round. The publishers give MD5; it finds files that were damaged on the way.

Why not a library. Here an interrupted download is continued where it ended (HTTP `Range`), also by a later call; a kept
part that does not fit is thrown away and fetched once more from the start; where one mirror fails the next is tried; a
file gets its name only when its checksum is right, so that no crash leaves half a file under that name; a second
process that fetches the same data set is refused; and every failure is one line with an exit code. pooch 1.9 checks
before it renames, too, but it starts every attempt at the first byte, takes one address per file, has no lock between
processes, and needs the package requests. torchvision 0.28 (`download_url`) writes under the final name, checks
afterwards, cannot continue a download, and waits for a silent server without end.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import os
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Protocol

from ddp_core.base.errors import ExitCode, UserError, nearest_name
from ddp_core.base.files import NewFile, take_lock

_BLOCK_BYTES = 1 << 18
_TIMEOUT_SECONDS = 20


@dataclass(frozen=True)
class Archive:
    """A published file: its addresses, tried in this order, its MD5, and its path below the data directory.

    Of a tar archive only the named `members` are unpacked, each against its MD5; a `.gz` file unpacks to its name
    without the ending.
    """

    urls: tuple[str, ...]
    md5: str
    path: str
    members: Mapping[str, str] = field(default_factory=dict)


_FASHION_MIRRORS = (
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
)
SOURCES: dict[str, tuple[Archive, ...]] = {
    "fashion_mnist": tuple(
        Archive(tuple(mirror + name for mirror in _FASHION_MIRRORS), md5, f"FashionMNIST/raw/{name}")
        for name, md5 in {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        }.items()
    ),
    "cifar10": (
        Archive(
            ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",),
            "c58f30108f718f92721af3b95e74349a",
            "cifar-10-python.tar.gz",
            {
                "cifar-10-batches-py/data_batch_1": "c99cafc152244af753f735de768cd75f",
                "cifar-10-batches-py/data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
                "cifar-10-batches-py/data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
                "cifar-10-batches-py/data_batch_4": "634d18415352ddfa80567beed471001a",
                "cifar-10-batches-py/data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
                "cifar-10-batches-py/test_batch": "40351d587109b95175f43aff81a1287e",
                "cifar-10-batches-py/batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
            },
        ),
    ),
}


class _Readable(Protocol):
    """A response of a server, or a file inside an archive."""

    def read(self, size: int = ..., /) -> bytes: ...


class _Interrupted(Exception):
    """A mirror did not answer, or stopped before the end; the bytes that have arrived are kept."""


class _Damaged(Exception):
    """The download is complete but is not the published file; it is thrown away."""


def fetch_command(name: str, root: Path) -> str:
    """The command that brings the data set `name` into `root`, as messages name it."""
    return f"ddp data fetch {name} --data-dir {root}"


def fetch_data_set(
    name: str,
    root: Path,
    report: Callable[[str], object] = print,
    sources: Mapping[str, tuple[Archive, ...]] = SOURCES,
) -> None:
    """Bring a data set into `root`, ready for training; complete files are kept, and partial downloads continued.

    Raises UserError: (2) for an unknown name, no network, a wrong checksum, or a data set that another process is
    fetching; (4) where `root` cannot be written.
    """
    if name not in sources:
        raise UserError(
            f"no data set {name} to fetch (those that come with the package are there already); "
            f"{nearest_name(name, sources)}"
        )
    try:
        root.mkdir(parents=True, exist_ok=True)
        # The lock, which ends with its process, keeps two processes from writing the same partial file.
        with (root / f".{name}.lock").open("w") as lock:
            if not take_lock(lock.fileno()):
                raise UserError(f"another process is fetching {name} into {root}; wait for it to end")
            for archive in sources[name]:
                _download(archive, root, report, fetch_command(name, root))
                _unpack(archive, root)
    except OSError as error:
        raise UserError(
            f"data directory {root} cannot be written: {error.strerror or error}; "
            "free space or choose another with --data-dir",
            ExitCode.RESOURCES,
        ) from None
    report(f"{name} is ready in {root}")


def _download(archive: Archive, root: Path, report: Callable[[str], object], command: str) -> None:
    """Fetch the archive from the first mirror that has it whole; `command` is what a message says to run again."""
    target = root / archive.path
    if target.is_file() and _md5(target) == archive.md5:
        report(f"{archive.path}: already here, checksum right")
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    failures = []
    for url in archive.urls:
        try:
            _receive_whole(url, archive, target, report)
            return
        except _Interrupted as failure:
            failures.append(f"{url}: {failure}; the part that has arrived is kept")
        except _Damaged as failure:
            failures.append(f"{url}: {failure}")
    raise UserError(
        f"could not fetch {archive.path} ({'; '.join(failures)}); check the network and run again: {command}"
    )


def _receive_whole(url: str, archive: Archive, target: Path, report: Callable[[str], object]) -> None:
    """Fetch from one mirror: continue the partial file, and if the result is wrong, fetch once more from the start."""
    part = target.with_name(target.name + ".part")
    resumed = part.is_file() and part.stat().st_size > 0
    _receive(url, part, archive.path, report)
    found = _md5(part)
    if found != archive.md5 and resumed:
        part.unlink()
        report(f"{archive.path}: what was kept from an earlier attempt does not fit, starting again")
        _receive(url, part, archive.path, report)
        found = _md5(part)
    if found != archive.md5:
        part.unlink()
        raise _Damaged(f"checksum {found} instead of {archive.md5}, thrown away")
    part.replace(target)


def _receive(url: str, part: Path, label: str, report: Callable[[str], object]) -> None:
    """Append to `part` the bytes of `url` that it lacks. Raises _Interrupted for the network, OSError for the disk."""
    start = part.stat().st_size if part.is_file() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "samebits", "Accept-Encoding": "identity"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # the server has no more bytes; the checksum says whether the file is right
        raise _Interrupted(f"HTTP {error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _Interrupted(str(getattr(error, "reason", error))) from None
    with response:
        continued = response.status == http.HTTPStatus.PARTIAL_CONTENT
        start = start if continued else 0
        expected = response.headers.get("Content-Length")
        total = start + int(expected) if expected and expected.isdigit() else None
        size = "an unknown number of" if total is None else f"{total:,}"
        report(f"{label}: {f'continued at {start:,} of' if start else 'fetching'} {size} bytes")
        with part.open("ab" if continued else "wb") as file:
            received = _copy(response, file, start, total, label, report)
            file.flush()
            os.fsync(file.fileno())
    if total is not None and received != total:
        raise _Interrupted(f"ended after {received:,} of {total:,} bytes")


def _copy(
    response: _Readable, file: BinaryIO, start: int, total: int | None, label: str, report: Callable[[str], object]
) -> int:
    """Copy blocks from the network to the file, report each tenth, and return the file's size."""
    received, told = start, start
    while True:
        try:
            block = response.read(_BLOCK_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise _Interrupted(f"{type(error).__name__} {error} after {received:,} bytes") from None
        if not block:
            return received
        file.write(block)
        received += len(block)
        if total is not None and received - told >= max(total / 10, 8 << 20):
            told = received
            report(f"{label}: {received / total:.0%}")


def _unpack(archive: Archive, root: Path) -> None:
    """Unpack beside the archive; each file is complete under its name, or not there at all."""
    source = root / archive.path
    if not archive.members:
        with gzip.open(source) as packed:
            _write(packed, source.with_suffix(""))
        return
    with tarfile.open(source) as packed_files:
        for member in packed_files:
            # Only names that are expected are written, so no name in the archive can lead elsewhere.
            name = str(PurePosixPath(member.name))
            content = packed_files.extractfile(member) if member.isreg() and name in archive.members else None
            if content is not None:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                _write(content, root / name)
    for name, md5 in archive.members.items():
        if not (root / name).is_file() or _md5(root / name) != md5:
            raise UserError(
                f"{root / archive.path} does not hold {name} as published; remove the archive and fetch again"
            )


def _write(content: _Readable, target: Path) -> None:
    with NewFile(target) as new:
        while block := content.read(_BLOCK_BYTES):
            new.write(block)
        new.sync()
        new.rename()


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()

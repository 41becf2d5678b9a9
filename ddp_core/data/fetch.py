"""Fetch published data sets into the data directory: only on request, never during training.

torchvision downloads, and knows addresses and MD5; data that it has downloaded before are found here. What it would
leave half done under a final name, where this process is killed, is unpacked here: each file is complete, or not there.
"""

from __future__ import annotations

import gzip
import socket
import tarfile
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import IO, NamedTuple
from urllib.error import URLError

from ddp_core.base.errors import ExitCode, UserError, nearest_name
from ddp_core.base.extras import require
from ddp_core.base.files import NewFile, take_lock
from ddp_core.base.torchvision_import import import_torchvision

NAMES = ("cifar10", "fashion_mnist")
_SECOND_MIRROR = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/"
_SILENT_SECONDS = 20


class Archive(NamedTuple):
    """A published file: its addresses, tried in this order, its MD5, and the folder below the data directory."""

    urls: tuple[str, ...]
    md5: str
    folder: str


def archives(name: str) -> list[Archive]:
    """The files that the data set consists of, as torchvision knows them."""
    known = import_torchvision("datasets")
    if name == "cifar10":
        return [Archive((known.CIFAR10.url,), known.CIFAR10.tgz_md5, ".")]
    mirrors = (*known.FashionMNIST.mirrors, _SECOND_MIRROR)
    files = known.FashionMNIST.resources
    return [Archive(tuple(mirror + file for mirror in mirrors), md5, "FashionMNIST/raw") for file, md5 in files]


def fetch_command(name: str, root: Path) -> str:
    """The command that brings the data set `name` into `root`, as messages name it."""
    return f"ddp data fetch {name} --data-dir {root}"


def fetch_data_set(name: str, root: Path, report: Callable[[str], object] = print) -> None:
    """Bring a data set into `root`, ready for training; archives that are there and whole are not fetched again.

    Raises UserError: (2) for an unknown name, no network, a wrong checksum, or a data set that another process is
    fetching; (4) where `root` cannot be written.
    """
    if name not in NAMES:
        raise UserError(
            f"no data set {name} to fetch (those that come with the package are there already); "
            f"{nearest_name(name, NAMES)}"
        )
    require("`ddp data fetch`", "vision")
    try:
        root.mkdir(parents=True, exist_ok=True)
        # The lock, which ends with its process, keeps two processes from writing the same archive.
        with (root / f".{name}.lock").open("w") as lock:
            if not take_lock(lock.fileno()):
                raise UserError(f"another process is fetching {name} into {root}; wait for it to end")
            for archive in archives(name):
                for path, content in _unpacked(_downloaded(archive, name, root)):
                    path.parent.mkdir(exist_ok=True)
                    with NewFile(path) as new:
                        while block := content.read(1 << 18):
                            new.write(block)
                        new.sync()
                        new.rename()
    except OSError as error:
        raise UserError(
            f"data directory {root} cannot be written: {error.strerror or error}; "
            "free space or choose another with --data-dir",
            ExitCode.RESOURCES,
        ) from None
    report(f"{name} is ready in {root}")


def _downloaded(archive: Archive, name: str, root: Path) -> Path:
    """The archive, from the first mirror that has it whole."""
    before, failures = socket.getdefaulttimeout(), []
    socket.setdefaulttimeout(_SILENT_SECONDS)  # torchvision gives none, and would wait for a silent server without end
    try:
        for url in archive.urls:
            path = root / archive.folder / url.rpartition("/")[2]
            try:
                import_torchvision("datasets.utils").download_url(url, path.parent, path.name, archive.md5)
                return path
            except (URLError, ConnectionError, TimeoutError, HTTPException, RuntimeError) as error:
                failures.append(f"{url}: {str(error).rstrip('.')}")
    finally:
        socket.setdefaulttimeout(before)
    raise UserError(
        f"could not fetch {'; '.join(failures)}; check the network and run again: {fetch_command(name, root)}"
    )


def _unpacked(archive: Path) -> Iterator[tuple[Path, IO[bytes] | gzip.GzipFile]]:
    """The files in an archive whose checksum is right, each with the path that it gets."""
    if archive.name.endswith(".tar.gz"):
        with tarfile.open(archive) as packed:
            for member in packed:
                if (content := packed.extractfile(member)) is not None:
                    yield archive.parent / member.name, content
    else:
        with gzip.open(archive) as single:
            yield archive.with_suffix(""), single

"""A folder of an object store, by fsspec: its objects by name, and each error as one line."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddp_core.base.errors import ExitCode, UserError, one_line
from ddp_core.base.extras import needs
from ddp_core.base.files import NewFile
from ddp_core.base.platforms import OPEN_FILES

_CLIENTS = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
"""The package that fsspec asks for, by scheme."""

_OPTIONS: dict[str, dict[str, Any]] = {
    "file": {"auto_mkdir": True},
    # Without a limit, a store that never answers would be waited for during many minutes.
    "s3": {"config_kwargs": {"retries": {"total_max_attempts": 3, "mode": "standard"}}},
}


class Store:
    """The objects below an address; names are relative to it, as `digits/single-…/run.json`.

    Raises UserError (2) where fsspec knows no such store, or its client is missing. Methods raise UserError (4) where
    the store does not answer or refuses.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        scheme = address.partition("://")[0]
        options: dict[str, Any] = _OPTIONS.get(scheme, {})
        try:
            fsspec = importlib.import_module("fsspec")
            with self._told(ImportError, ValueError):
                self._files, self._root = fsspec.url_to_fs(address, use_listings_cache=False, **options)
        except ImportError:
            package = _CLIENTS.get(scheme, "fsspec")
            how = (
                needs(address, "s3", package)
                if package == "s3fs"
                else f"{address} needs {package}: pip install {package}"
            )
            raise UserError(how) from None
        except ValueError as error:
            raise UserError(f"{address}: {one_line(error)}; give an address such as s3://bucket/runs") from None
        self._root = self._root.rstrip("/")
        if scheme == "s3":
            self._files.retries = 1  # the layer below tries again, and whoever copies does

    def names(self) -> set[str]:
        """The names of all objects, without those that only mark a folder."""
        with self._told(), contextlib.suppress(FileNotFoundError):
            names = {path[len(self._root) + 1 :] for path in self._files.find(self._root, withdirs=False)}
            return {name for name in names if name and not name.endswith("/")}
        return set()

    def read(self, name: str) -> bytes | None:
        """The content of a small object; None where there is none."""
        with self._told(), contextlib.suppress(FileNotFoundError):
            content: bytes = self._files.cat_file(self._path(name))
            return content
        return None

    def write(self, name: str, content: bytes) -> None:
        """Write a small object; a reader sees all of it, or what was there before."""
        with self._told():
            self._files.pipe_file(self._path(name), content)

    def send(self, name: str, file: int) -> None:
        """Write the content of an open file, however large; an error leaves what was there before."""
        size = os.fstat(file).st_size
        with self._told():
            # By its descriptor, since the file may be removed while it is sent.
            self._files.put_file(f"{OPEN_FILES}/{file}", self._path(name))
            arrived = self._files.info(self._path(name))["size"]
        if arrived < size:
            raise UserError(f"{self.address}/{name} has {arrived} bytes of {size}", ExitCode.RESOURCES)

    def fetch(self, name: str, target: Path) -> None:
        """Read an object into a file, which is there whole or not at all. Raises FileNotFoundError, too."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with NewFile(target) as new:
            with self._told(FileNotFoundError):
                self._files.get_file(self._path(name), str(new.temporary))
            new.rename()

    def remove(self, name: str) -> None:
        """Remove an object, if it is there."""
        with self._told(), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextlib.contextmanager
    def _told(self, *passed: type[Exception]) -> Iterator[None]:
        """A block in which what the client raises, which may be of any kind, becomes one line; `passed` does not."""
        try:
            yield
        except Exception as error:
            if isinstance(error, (UserError, *passed)):
                raise
            raise UserError(f"{self.address}: {one_line(error) or type(error).__name__}", ExitCode.RESOURCES) from error

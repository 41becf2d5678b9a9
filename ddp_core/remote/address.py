"""An address: the store and the path in it that it means, the local folders that stand for it, and errors in words."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_core.base.beneath import open_file
from ddp_core.base.errors import ExitCode, UserError, one_line
from ddp_core.base.extras import needs
from ddp_core.base.shown import shown

_LONGEST = 300
_CREDENTIALS = (
    "give this machine credentials for it (for s3 AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or a role)"
)
_REFUSED = ("PermissionError", "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "RefreshError")
"""The names of the exceptions with which stores answer wrong or missing credentials."""
PIECE = 2**24
_MOSTPIECES = 9000
"""S3 takes no file in more than 10,000."""


@dataclass(frozen=True)
class Address:
    """`scheme://name/…`, where each of the names may be a folder's, too."""

    text: str

    @classmethod
    def of(cls, text: str) -> Address:
        """The address. Raises UserError where it is none, or holds what should not stand in a record."""
        scheme, _, rest = text.partition("://")
        if "::" in text or not scheme.isalnum() or not rest.strip("/"):
            raise UserError(f"{text} is no address of a store; give one such as s3://bucket/runs")
        if "?" in text or ":" in rest.partition("/")[0].rpartition("@")[0]:
            raise UserError(
                "an address is written into run.json, so it may hold no password and no query; " + _CREDENTIALS
            )
        if any(name in (".", "..") for name in rest.split("/")):
            raise UserError(f"{text}: an address may not have . or .. in it")
        return cls(text.rstrip("/"))

    def __truediv__(self, name: str) -> Address:
        return Address(f"{self.text}/{name}") if name else self

    @property
    def _parts(self) -> tuple[str, ...]:
        scheme, _, rest = self.text.partition("://")
        return (scheme, *filter(None, rest.split("/")))

    @property
    def name(self) -> str:
        """The last of its names."""
        return self._parts[-1]

    @property
    def parent(self) -> Address:
        """The folder in which it lies."""
        return Address(self.text.rpartition("/")[0])

    @property
    def written(self) -> Path:
        """Where the runs for this address are trained: below the folder of all runs, or of $DDP_OUTPUT."""
        output = os.environ.get("DDP_OUTPUT", "outputs")
        return Path("outputs" if "://" in output else output).joinpath(*self._parts)

    @property
    def superseded(self) -> Path:
        """Where a run of `written` is put that was continued from the store, on another machine, meanwhile."""
        return self.written.parents[len(self._parts) - 1].joinpath("superseded", *self._parts[:-1]) / (
            f"{self.name}-{secrets.token_hex(3)}"
        )

    @property
    def copied(self) -> Path:
        """Where commands that only read have their copy."""
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(cache).joinpath("samebits", *self._parts)

    def store(self) -> tuple[Any, str]:
        """The fsspec file system, and the path in it. Raises UserError where its package is missing."""
        import fsspec.core  # comes with torch
        from fsspec.registry import known_implementations

        scheme = self._parts[0]
        # Files change while this process lives, so nothing is believed from an earlier listing.
        settings = {"skip_instance_cache": True, "use_listings_cache": False}
        if scheme in ("file", "local"):
            settings["auto_mkdir"] = True
        try:
            found, path = fsspec.core.url_to_fs(self.text, **settings)
        except ImportError:
            package = known_implementations[scheme]["class"].partition(".")[0]
            missing = f"{package}: pip install {package}"
            raise UserError(
                needs(self.text, "remote", package) if package == "s3fs" else f"{self.text} needs {missing}"
            ) from None
        except ValueError:
            raise UserError(f"{self.text}: no store is known as {scheme}; such are s3, gs and abfs") from None
        return found, path


@contextlib.contextmanager
def reaching(address: Address, lets_through: type[Exception] = UserError) -> Iterator[None]:
    """A block that talks to the store alone: what it raises and is not `lets_through` becomes a UserError (4)."""
    try:
        yield
    except (UserError, lets_through):
        raise
    except Exception as error:
        cause = shown(one_line(error) or type(error).__name__)[:_LONGEST]
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if kinds & set(_REFUSED):
            todo = _CREDENTIALS
        elif "FileNotFoundError" in kinds:
            todo = "there is no such place: make the bucket, or mend the address"
        else:
            todo = "look whether the store can be reached from here, and then start again"
        raise UserError(f"{address.text}: {type(error).__name__}: {cause}; {todo}", ExitCode.RESOURCES) from None


def put(store: Any, path: str, file: Path, size: int) -> None:
    """Write the file's first `size` bytes to the store, in which it is whole or not there."""
    with open_file(file) as content:
        if size <= PIECE:
            store.pipe_file(path, content.read(size))
            return
        with store.open(path, "wb", block_size=max(PIECE, size // _MOSTPIECES)) as target:
            while piece := content.read(min(PIECE, size)):
                target.write(piece)
                size -= len(piece)

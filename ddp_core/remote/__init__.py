"""Runs in object storage: an address such as `s3://bucket/runs` in the place of a folder.

A run trains in a local folder that stands for the address. A process of its own, which loads the store's client,
copies what is committed there while the run trains (`python -m ddp_core.remote follow`), and brings runs of others
(`bring`), so training loads none of this. docs/reference/run-directory.md says what holds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

from ddp_core.base.errors import ExitCode, UserError

_SEPARATOR = "://"
RUN_FILE = "DDP_RUN_FILE"
"""The variable with the file into which a training writes where its run directory is: see `tell_caller`."""


def is_address(named: str | os.PathLike[str]) -> bool:
    """Whether this is an address in a store, and no path."""
    return _SEPARATOR in os.fspath(named)


def local(named: str | os.PathLike[str]) -> Path:
    """The local folder that stands for an address; any other path is itself. Raises UserError for a bad address."""
    text = os.fspath(named)
    if not is_address(text):
        return Path(text)
    scheme, _, rest = text.partition(_SEPARATOR)
    parts = [part for part in rest.split("/") if part]
    if "@" in rest or "?" in rest:
        # A run records its command, and prints it.
        raise UserError(
            "an address of a store must not hold credentials or options, since runs record it; give them by the "
            "variables or files of the store's own client, such as AWS_ACCESS_KEY_ID or AWS_ENDPOINT_URL"
        )
    if not scheme.isalnum() or not parts or not {".", ".."}.isdisjoint(parts):
        raise UserError(f"{text} is no address of a store; give one such as s3://bucket/runs")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "samebits" / scheme / Path(*parts)


def brought(named: str | os.PathLike[str], *options: str) -> Path:
    """`named`; of an address the local folder, with what is in the store. `options`: of `ddp_core.remote bring`.

    Raises UserError (4) where the store cannot be read.
    """
    folder = local(named)
    if is_address(named):
        words = [sys.executable, "-m", "ddp_core.remote", "bring", os.fspath(named), *options]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["no message"])[-1]
            known = done.returncode if done.returncode in set(ExitCode) else ExitCode.INTERNAL
            raise UserError(said.removeprefix("ddp: ").removeprefix("error: "), known)
        sys.stderr.write(done.stderr)
    return folder


def copied(address: str, train: Callable[[], int]) -> int:
    """What `train` returns; while it trains, its run is copied to the address, and at its end all of it.

    Returns 4 where the training has ended with 0, and its run could not be copied.
    """
    given = os.environ.get(RUN_FILE)
    # The copying process removes the folder, since it outlives this one where that is killed.
    file = os.environ[RUN_FILE] = given or str(Path(mkdtemp(prefix="ddp-copies-")) / "run")
    words = [sys.executable, "-m", "ddp_core.remote", "follow", address, file, *(() if given else ("--own",))]
    # In a session of its own, out of reach of Ctrl-C. Where this process is killed, its end of the pipe is closed.
    with subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True) as copier:
        try:
            code = train()
        finally:
            if given is None:
                del os.environ[RUN_FILE]
            copier.communicate(b"end")
    return code or (ExitCode.RESOURCES if copier.returncode else ExitCode.DONE)

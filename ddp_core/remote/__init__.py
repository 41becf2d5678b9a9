"""Runs in object storage: an address such as `s3://bucket/runs` in the place of a folder.

A run trains in a local folder that stands for the address, and that no other command touches. A process of its own,
which loads the store's client, copies what is committed there while the run trains (`python -m ddp_core.remote
follow`). Commands that read from an address get a temporary copy (`bring`). docs/reference/run-directory.md says what
holds.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import is_address
from ddp_core.distributed.children import error_of
from ddp_core.distributed.reports import RUN_FILE


def local(named: str | os.PathLike[str]) -> Path:
    """The folder in which runs of an address train; any other path is itself. Raises UserError for a bad address."""
    text = os.fspath(named)
    if not is_address(text):
        return Path(text)
    scheme, _, rest = text.partition("://")
    parts = [part for part in rest.split("/") if part]
    if "@" in rest or "?" in rest:
        # A run records its command, and prints it.
        raise UserError(
            "an address of a store must not hold credentials or options, since runs record it; give them by the "
            "variables or files of the store's own client, such as AWS_ACCESS_KEY_ID or AWS_ENDPOINT_URL"
        )
    if not scheme.isalnum() or not parts or not {".", ".."}.isdisjoint(parts):
        raise UserError(f"{text} is no address of a store; give one such as s3://bucket/runs")
    return cache() / scheme / Path(*parts)


def cache() -> Path:
    """The folder of all local folders."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()).absolute() / "samebits"


def brought(named: str | os.PathLike[str], *options: str) -> Path:
    """`named`; of an address a copy of the run there, in a temporary folder that goes with this process.

    `options`: `--records` brings a folder of runs, without their checkpoints and weights. Raises UserError (2) where no
    run is there, and (4) where the store cannot be read.
    """
    if not is_address(named):
        return Path(named)
    local(named)
    folder = Path(mkdtemp(prefix="ddp-brought-"))
    atexit.register(_remove, folder, os.getpid())
    _call("bring", os.fspath(named), str(folder), *options)
    return folder


def brought_to_train(address: str, wanted: str) -> None:
    """Before a training: bring the runs that it may go on with into the folder of the address.

    `wanted`: as for `bringing.prepare`.

    What launches of this machine have not copied yet is copied first. Raises UserError (4) where the store cannot be
    read and written.
    """
    _call("prepare", address, wanted)


def copied(address: str, train: Callable[[], int]) -> int:
    """What `train` returns; while it trains, its run is copied to the address, and at its end all of it.

    Returns 4 where the training has ended well or was stopped, and not all of its run could be copied.
    """
    given = os.environ.get(RUN_FILE)
    # The copying process removes the folder, since it outlives this one where that is killed.
    file = os.environ[RUN_FILE] = given or str(Path(mkdtemp(prefix="ddp-copies-")) / "run")
    words = [*_COMMAND, "follow", address, file, str(os.getpid()), *(() if given else ("--own",))]
    # The copying process has a session of its own, so Ctrl-C does not reach it. If this process is killed, its end of
    # the pipe closes, and the copying process notices that.
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True) as copier:
        try:
            code = train()
        finally:
            if given is None:
                del os.environ[RUN_FILE]
            copier.communicate(b"end")
    if copier.returncode < 0:
        print(f"ddp: error: the process that copies to {address} was killed; not all is there", file=sys.stderr)
    return ExitCode.RESOURCES if copier.returncode and code in (ExitCode.DONE, ExitCode.STOPPED) else code


_COMMAND = (sys.executable, "-m", "ddp_core.remote")


def _call(*words: str) -> None:
    done = subprocess.run(
        [*_COMMAND, *words], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", check=False
    )
    if done.returncode:
        raise error_of(done.returncode, done.stderr.splitlines())
    sys.stderr.write(done.stderr)


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not in a fork of it
        shutil.rmtree(folder, ignore_errors=True)

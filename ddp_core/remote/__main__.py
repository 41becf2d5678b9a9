"""`python -m ddp_core.remote bring|follow ADDRESS …`: the processes that load a store's client."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

from ddp_core.base.ending import said_by
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.distributed.reports import tell_user
from ddp_core.remote import local
from ddp_core.remote.bringing import bring, bring_newest
from ddp_core.remote.sending import CHECKPOINTS, Sender
from ddp_core.remote.store import Store

_LOOK_SECONDS = 1.0
_LONGEST_PAUSE = 60.0
_LAST_ATTEMPTS = 3


@said_by("ddp")
def main(words: list[str]) -> int:
    """Bring runs, or follow a training until the pipe on standard input is closed; returns the exit code."""
    verb, address, *rest = words
    if verb == "follow":
        try:
            return follow(address, Path(rest[0]))
        finally:
            if "--own" in rest:
                shutil.rmtree(Path(rest[0]).parent, ignore_errors=True)
    if rest and rest[0] == "--before-training":
        bring_newest(address, local(address), rest[1] if len(rest) > 1 else None)
    else:
        bring(address, local(address), with_weights="--records" not in rest)
    return ExitCode.DONE


def follow(address: str, run_file: Path) -> int:
    """Copy the run that `run_file` names whenever something new is committed, and at the end of its training.

    A failure is told once; training goes on, and it is tried again, at the end three times. Raises UserError (4).
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)
    sender: Sender | None = None
    seen: object = None
    pause, failed, attempts = _LOOK_SECONDS, False, 0
    while True:
        # What comes through the pipe says that the training is over, and so does its end.
        is_last = bool(select.select([sys.stdin], [], [], pause)[0])
        run = Path(run_file.read_text()) if run_file.exists() else None
        if run is None or ((state := _state(run)) == seen and not is_last):
            if is_last:
                return ExitCode.DONE
            continue
        try:
            if sender is None:
                sender = Sender(run, Store(f"{address.rstrip('/')}/{run.parent.name}/{run.name}"))
            sender.send()
        except UserError as error:
            attempts += is_last
            if attempts == _LAST_ATTEMPTS or error.exit_code == ExitCode.BAD_INPUT:
                raise UserError(
                    f"{error}. Not all of the run is there; it is in {run}, and the next `ddp train` with this "
                    "--output copies it first",
                    ExitCode.RESOURCES,
                ) from None
            if not failed:
                tell_user(f"warning: {error}; training goes on, and what is saved will be copied later")
            failed, pause = True, min(2 * pause, _LONGEST_PAUSE)
            if is_last:
                time.sleep(pause)
            continue
        seen, pause, failed = state, _LOOK_SECONDS, False
        if is_last:
            return ExitCode.DONE


def _state(run: Path) -> object:
    """What changes when something is committed: the folder of checkpoints, and the record."""
    return [path.stat().st_mtime_ns for path in (run / CHECKPOINTS, run / "run.json") if path.exists()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

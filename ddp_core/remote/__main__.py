"""`python -m ddp_core.remote bring|prepare|follow ADDRESS …`: the processes that load a store's client."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

from ddp_core.base.ending import said_by
from ddp_core.base.errors import ExitCode, UserError, one_line
from ddp_core.distributed.reports import tell_user
from ddp_core.remote import local
from ddp_core.remote.bringing import bring, prepare
from ddp_core.remote.sending import CHECKPOINTS, RECORD, Sender, Superseded
from ddp_core.remote.store import Store

_LOOK_SECONDS = 1.0
_LONGEST_PAUSE = 60.0
_LAST_ATTEMPTS = 3


@said_by("ddp")
def main(words: list[str]) -> int:
    """Bring runs, or follow a training to its end; returns the exit code."""
    verb, address, *rest = words
    if verb == "bring":
        bring(address, Path(rest[0]), records_only="--records" in rest)
    elif verb == "prepare":
        prepare(address, local(address), rest[0])
    else:
        try:
            follow(address, Path(rest[0]), int(rest[1]))
        finally:
            if "--own" in rest:
                shutil.rmtree(Path(rest[0]).parent, ignore_errors=True)
    return ExitCode.DONE


def follow(address: str, run_file: Path, trainer: int) -> None:
    """Copy the run that `run_file` names whenever something new is committed, and at the end of the process `trainer`.

    What fails is told once and tried again, at the end three times in all. Raises UserError (4).
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)
    with contextlib.ExitStack() as opened:
        sender: Sender | None = None
        run: Path | None = None
        seen: object = None
        pause, attempts_left, is_over = _LOOK_SECONDS, _LAST_ATTEMPTS, False
        while True:
            if is_over:
                time.sleep(0 if attempts_left == _LAST_ATTEMPTS else pause)
            else:
                is_over = bool(select.select([sys.stdin], [], [], pause)[0]) or os.getppid() != trainer
                pause = _LOOK_SECONDS if is_over else pause
            if run is None and run_file.exists():
                # The file is read once: a training that the user's own code starts writes its directory there later.
                run = Path(run_file.read_text())
            state = None if run is None else _state(run)
            if run is not None and (is_over or state != seen):
                try:
                    if sender is None:
                        there = Store(f"{address.rstrip('/')}/{run.parent.name}/{run.name}")
                        sender = opened.enter_context(Sender(run, there))
                    sender.send()
                    seen, pause = state, _LOOK_SECONDS
                except Superseded:
                    raise
                except Exception as error:  # whatever a client raises, what is here is copied later
                    attempts_left -= is_over
                    if not attempts_left:
                        raise UserError(
                            f"{one_line(error)}. Not all of the run is there; it is in {run}, and the next `ddp train` "
                            "with this --output copies it first",
                            ExitCode.RESOURCES,
                        ) from None
                    if pause == _LOOK_SECONDS:
                        tell_user(f"warning: {one_line(error)}; this is tried again, and training goes on")
                    pause = min(2 * pause, _LONGEST_PAUSE)
                    continue
            if is_over:
                return


def _state(run: Path) -> object:
    """What changes when something is committed: the folder of checkpoints, and the record."""
    with contextlib.suppress(OSError):
        return [path.stat().st_mtime_ns for path in (run / CHECKPOINTS, run / RECORD) if path.exists()]
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

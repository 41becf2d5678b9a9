"""Brings runs from a store: a copy to read, or into the folder in which they go on."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

from ddp_core.base.beneath import NotAFile, open_file
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import take_lock
from ddp_core.remote.sending import (
    CHECKPOINTS,
    OF_THIS_MACHINE,
    RECORD,
    WRITER,
    Sender,
    has_more,
    is_superseded,
    keep,
)
from ddp_core.remote.store import Store

_PROBE = ".samebits"
_ATTEMPTS = 3


def bring(address: str, folder: Path, records_only: bool) -> None:
    """Copy the run at the address into the empty folder, or with `records_only` the records of all runs below it.

    Raises UserError (2) where there is no run, or (4).
    """
    store = Store(address)
    names = store.names()
    runs = [str(PurePosixPath(name).parent) for name in names if PurePosixPath(name).name == RECORD]
    if not (runs if records_only else RECORD in names):
        raise UserError(f"{address}: no run is there (no {RECORD})")
    for run in runs if records_only else ["."]:
        there = store if run == "." else Store(f"{store.address}/{run}")
        for attempt in range(_ATTEMPTS):
            place = folder if run == "." else _beneath(folder, run)
            try:
                _fetch(there, place, records_only)
                break
            except FileNotFoundError as gone:  # a checkpoint that its training has removed meanwhile
                shutil.rmtree(place, ignore_errors=True)
                if attempt == _ATTEMPTS - 1:
                    raise UserError(f"{there.address}: {gone} is gone", ExitCode.RESOURCES) from None


def prepare(address: str, folder: Path, wanted: str) -> None:
    """Before a training: copy what launches of this machine have not copied, then bring what it may go on with.

    `wanted`: a run, as EXPERIMENT/RUN; or the name of an experiment's file, which means its runs that are not completed
    and the newest completed one. A local run stays unless another machine has gone on with it; then it is put aside.
    Raises UserError (4) where nothing can be written.
    """
    store = Store(address)
    store.write(_PROBE, b"")
    for record in sorted(folder.glob("*/*/run.json")):
        run = record.parent
        there = Store(f"{store.address}/{run.relative_to(folder)}")
        if not _is_worked_in(run) and not is_superseded(there, run) and has_more(run, there):
            with Sender(run, there) as sender:
                sender.send()
    for name in [wanted] if "/" in wanted else _resumable(store, wanted):
        run, there = _beneath(folder, name), Store(f"{store.address}/{name}")
        if run.exists():
            if _is_worked_in(run) or not is_superseded(there, run):
                continue
            _set_aside(run, folder)
        run.parent.mkdir(parents=True, exist_ok=True)
        new = run.with_name(f".{run.name}.{secrets.token_hex(3)}")
        try:
            bring(there.address, new, records_only=False)
            keep(new, {"names": [(there.read(WRITER) or b"").decode()], "committed": [], "sent": {}})
            new.rename(run)
        finally:
            shutil.rmtree(new, ignore_errors=True)


def _resumable(store: Store, experiment_file: str) -> list[str]:
    found: list[tuple[str, bool, str]] = []
    for name in store.names():
        path = PurePosixPath(name)
        if path.name == RECORD and len(path.parts) == 3:
            with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):
                facts: dict[str, Any] = json.loads(store.read(name) or b"{}")
                if PurePosixPath(str(facts["experiment_file"])).name == experiment_file:
                    found.append((str(facts["started_at"]), facts.get("status") == "completed", str(path.parent)))
    completed = [name for _, is_completed, name in sorted(found) if is_completed]
    return [name for _, is_completed, name in found if not is_completed] + completed[-1:]


def _fetch(store: Store, run: Path, records_only: bool) -> None:
    for name in sorted(store.names(), key=lambda name: (name == RECORD, name)):
        if name == WRITER or name in OF_THIS_MACHINE or (records_only and _is_large(name)):
            continue
        store.fetch(name, _beneath(run, name))
    run.joinpath(CHECKPOINTS).mkdir(parents=True, exist_ok=True)


def _is_large(name: str) -> bool:
    return name.startswith(f"{CHECKPOINTS}/") or name.endswith(".safetensors")


def _is_worked_in(run: Path) -> bool:
    """Whether a process of this machine trains in the run's directory."""
    with contextlib.suppress(FileNotFoundError, NotAFile), open_file(run / "run.lock") as file:
        return not take_lock(file.fileno(), shared=True, patience=0)
    return False


def _set_aside(run: Path, folder: Path) -> None:
    """Move a local run with which another machine has gone on out of the folder of runs; nothing is deleted."""
    aside = folder.with_name(f"{folder.name}.superseded") / f"{run.name}-{secrets.token_hex(3)}"
    aside.parent.mkdir(parents=True, exist_ok=True)
    run.rename(aside)


def _beneath(folder: Path, name: str) -> Path:
    """The path of an object's name. Raises UserError for one that leads out of the folder."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or not {"..", "."}.isdisjoint(parts) or "\0" in name:
        raise UserError(f"an object has the name {name!r}, which would lead out of {folder}")
    return folder.joinpath(*parts)

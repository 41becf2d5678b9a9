"""Brings runs from a store: a copy to read, or into the folder in which they go on."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

from ddp_core.base.beneath import open_beneath
from ddp_core.base.errors import ExitCode, UserError, one_line
from ddp_core.base.files import take_lock
from ddp_core.distributed.reports import tell_user
from ddp_core.remote import cache
from ddp_core.remote.sending import (
    CHECKPOINTS,
    OF_THIS_MACHINE,
    RECORD,
    WRITER,
    Sender,
    data_of,
    has_more,
    is_manifest,
    is_superseded,
    keep,
    manifests_in,
    writer_of,
)
from ddp_core.remote.store import Store

_PROBE = ".samebits"
_ATTEMPTS = 3


class Changing(UserError):
    """A training removes what is read before it can be read."""


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
        place = folder if run == "." else _beneath(folder, run)
        for left in reversed(range(_ATTEMPTS)):
            try:
                if _fetch(there, place, records_only):
                    break
            except UserError:
                if not left:
                    raise
        else:
            raise Changing(f"{there.address}: it changes faster than it can be read", ExitCode.RESOURCES)


def prepare(address: str, folder: Path, wanted: str) -> None:
    """Before a training: copy what launches of this machine have not copied, then bring what it may go on with.

    `wanted`: a run, as EXPERIMENT/RUN; or the name of an experiment's file, which means its runs that are not completed
    and the newest completed one; nothing is brought for an empty text. A local run with which another machine has gone
    on is put aside. What cannot be copied now is told. Raises UserError (4) where nothing can be written or read.
    """
    store = Store(address)
    store.write(_PROBE, b"")
    for record in sorted(folder.glob("*/*/run.json")):
        _settle(record.parent, Store(f"{store.address}/{record.parent.relative_to(folder)}"))
    names = [wanted] if "/" in wanted else _resumable(store, wanted) if wanted else []
    for name in names:
        if not (run := _beneath(folder, name)).exists():
            try:
                _bring_to_train(Store(f"{store.address}/{name}"), run)
            except Changing as error:
                if name == wanted:
                    raise
                tell_user(f"warning: {error}; a training works there, so it is not brought")


def _settle(run: Path, there: Store) -> None:
    """Copy what the store lacks of a local run; or put the run aside where another machine has gone on with it."""
    try:
        if is_superseded(there, run):
            aside = cache() / "superseded" / f"{run.name}-{secrets.token_hex(3)}"
            aside.parent.mkdir(parents=True, exist_ok=True)
            # The lock of trainings keeps them out; where one works there now, nothing is moved.
            lock = open_beneath(run / "run.lock", os.O_RDWR | os.O_CREAT)
            try:
                if take_lock(lock):
                    shutil.move(run, aside)
                    tell_user(f"another machine has gone on with {there.address}; what was here is in {aside}")
            finally:
                os.close(lock)
        elif has_more(run, there):
            with Sender(run, there) as sender:
                sender.send()
    except (UserError, OSError) as error:
        tell_user(f"warning: {one_line(error)}; what is in {run} is not all copied yet")


def _bring_to_train(there: Store, run: Path) -> None:
    """Bring a run into its folder, where it is seen whole or not at all."""
    new = cache() / "bringing" / secrets.token_hex(6)
    try:
        writer, committed = writer_of(there) or "", sorted(manifests_in(there))
        bring(there.address, new, records_only=False)
        facts = (new / RECORD).stat()
        sent = {RECORD: [facts.st_mtime_ns, facts.st_size]}
        keep(new, {"names": [writer], "committed": committed, "sent": sent, "is_copy": True})
        run.parent.mkdir(parents=True, exist_ok=True)
        try:
            new.rename(run)
        except OSError:
            if not run.exists():  # else another launch has just brought it
                raise
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


def _fetch(store: Store, run: Path, records_only: bool) -> bool:
    """Fetch a run, its newest checkpoints first, without what its training removes or replaces meanwhile.

    Returns whether the record came, and a whole checkpoint if the store lists any.
    """
    shutil.rmtree(run, ignore_errors=True)
    names = {name for name in store.names() if name != WRITER and name not in OF_THIS_MACHINE}
    for name in sorted(names - {RECORD}, reverse=True):
        is_large = name.startswith(f"{CHECKPOINTS}/") or name.endswith(".safetensors")
        if not (records_only and is_large):
            with contextlib.suppress(FileNotFoundError):
                store.fetch(name, _beneath(run, name))
    manifests = [run / name for name in names if is_manifest(name) and not records_only]
    for manifest in manifests:
        if data_of(manifest) is None:
            manifest.unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        store.fetch(RECORD, run / RECORD)
        (run / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
        return not manifests or any(manifest.exists() for manifest in manifests)
    return False


def _beneath(folder: Path, name: str) -> Path:
    """The path of an object's name. Raises UserError for one that leads out of the folder."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or not {"..", "."}.isdisjoint(parts) or "\0" in name:
        raise UserError(f"an object has the name {name!r}, which would lead out of {folder}")
    return folder.joinpath(*parts)

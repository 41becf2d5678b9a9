"""Brings runs from a store into the local folder that stands for its address."""

from __future__ import annotations

import contextlib
import json
import secrets
from pathlib import Path, PurePosixPath
from typing import Any

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import replace_file
from ddp_core.checkpoint.manifest import step_of_manifest
from ddp_core.remote.sending import BROUGHT, CHECKPOINTS, COPIED, WRITER, Brought, Busy, Sender, brought_of, wrote
from ddp_core.remote.store import Store

_RECORD = "run.json"
_PROBE = ".samebits"
_ATTEMPTS = 3


def bring(address: str, folder: Path, with_weights: bool = True) -> None:
    """Bring each run at or below the address. Without weights: records and figures alone, as `ddp compare` needs.

    Raises UserError (2) where there is no run, or (4).
    """
    store = Store(address)
    records = [name for name in store.names() if PurePosixPath(name).name == _RECORD]
    if not records:
        raise UserError(f"{address}: no run is there (no run.json)")
    for name in records:
        run = str(PurePosixPath(name).parent)
        is_itself = run == "."
        place = folder if is_itself else _beneath(folder, run)
        bring_run(store if is_itself else Store(f"{store.address}/{run}"), place, with_weights)


def bring_newest(address: str, folder: Path, experiment_file: str | None) -> None:
    """Before a training: copy what launches of this machine have not copied yet, then bring the run to go on with.

    That is the newest run of the experiment's file that is not completed, or else the newest one. Without a file, none
    is brought. Raises UserError (4) where nothing can be written at the address.
    """
    store = Store(address)
    store.write(_PROBE, b"")
    for record in sorted(folder.glob("*/*/run.json")):
        run = record.parent
        there = Store(f"{store.address}/{run.relative_to(folder)}")
        if wrote(run) or there.read(_RECORD) is None:
            if _is_superseded(there, run):
                _set_aside(run, folder)
            else:
                with contextlib.suppress(Busy):
                    sender = Sender(run, there)
                    sender.send()
                    sender.close()
    if experiment_file is None:
        return
    found: list[tuple[bool, str, str]] = []
    for name in store.names():
        if PurePosixPath(name).name == _RECORD and len(PurePosixPath(name).parts) == 3:
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                facts: dict[str, Any] = json.loads(store.read(name) or b"{}")
                if PurePosixPath(str(facts["experiment_file"])).name == experiment_file:
                    found.append(
                        (facts.get("status") != "completed", str(facts["started_at"]), str(PurePosixPath(name).parent))
                    )
    if found:
        run_name = max(found)[2]
        bring_run(Store(f"{store.address}/{run_name}"), _beneath(folder, run_name), True)


def bring_run(store: Store, run: Path, with_weights: bool) -> None:
    """Bring one run, unless this machine is ahead of the store: it has written there last."""
    if wrote(run):
        if not _is_superseded(store, run):
            return None
        _set_aside(run, run.parent)
    for attempt in range(_ATTEMPTS):
        try:
            return _fetch(store, run, with_weights)
        except FileNotFoundError as gone:  # a checkpoint that its training has removed meanwhile
            if attempt == _ATTEMPTS - 1:
                raise UserError(f"{store.address}: {gone} is gone", ExitCode.RESOURCES) from None
    return None


def _fetch(store: Store, run: Path, with_weights: bool) -> None:
    writer, names, have = store.read(WRITER) or b"", store.names(), brought_of(run)["objects"]
    names.pop(WRITER, None)
    wanted = {name: token for name, token in names.items() if with_weights or not _is_weight(name)}
    if with_weights:
        for path in (run / CHECKPOINTS).glob("step-*"):
            if f"{CHECKPOINTS}/{path.name}" not in names:
                path.unlink()
    # What commits comes last: a folder without a record is no run, and data without a manifest no checkpoint.
    for name in sorted(wanted, key=lambda name: (name == _RECORD, step_of_manifest(Path(name).name) is not None, name)):
        path = _beneath(run, name)
        if have.get(name) != wanted[name] or not path.is_file():
            store.fetch(name, path)
            have[name] = wanted[name]
    run.joinpath(CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    kept = {name: token for name, token in have.items() if name in names}
    replace_file(run / BROUGHT, json.dumps(Brought(writer=writer.decode(errors="replace"), objects=kept)))


def _is_weight(name: str) -> bool:
    return name.startswith(f"{CHECKPOINTS}/") or name.endswith(".safetensors")


def _is_superseded(store: Store, run: Path) -> bool:
    """Whether another machine has written since."""
    writer = store.read(WRITER)
    return writer is not None and writer.decode(errors="replace") not in wrote(run)


def _set_aside(run: Path, folder: Path) -> None:
    """Move a local run that another machine has gone on with out of the folder of runs; nothing is deleted."""
    aside = folder.with_name(f"{folder.name}.superseded") / f"{run.name}-{secrets.token_hex(3)}"
    aside.parent.mkdir(parents=True, exist_ok=True)
    run.rename(aside)
    (aside / COPIED).unlink(missing_ok=True)


def _beneath(folder: Path, name: str) -> Path:
    """The path of an object's name. Raises UserError for one that leads out of the folder."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or not {"..", "."}.isdisjoint(parts) or "\0" in name:
        raise UserError(f"an object has the name {name!r}, which would lead out of {folder}")
    return folder.joinpath(*parts)

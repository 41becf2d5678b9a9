"""Copies a run directory to a store, where a reader finds each checkpoint whole or not at all.

One writer at a time: an object `writer` names the launch that copies, and a launch that finds another name there copies
no more. The local folder keeps the names under which it has written (`copied.json`): by that it knows whether it is
ahead of the store, or whether another machine has gone on.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path

from typing_extensions import TypedDict

from ddp_core.base.beneath import open_beneath, open_file, read_file
from ddp_core.base.documents import BadDocument, read_document
from ddp_core.base.errors import UserError
from ddp_core.base.files import replace_file, take_lock, target_of
from ddp_core.checkpoint.manifest import Damaged, pointed_step, read_manifest, step_of_manifest
from ddp_core.remote.store import Store

COPIED = "copied.json"
BROUGHT = "brought.json"
WRITER = "writer"
CHECKPOINTS = "checkpoints"
_RECORD = "run.json"
_POINTERS = ("latest.json", "best.json")
LOCK = "copied.lock"
_LOCAL = {COPIED, BROUGHT, LOCK, "run.lock", _RECORD}
"""Files of a run directory that are copied in no step of their own: the record comes last, the others stay here."""


class Busy(UserError):
    """Another process of this machine copies the run."""


class _Copied(TypedDict):
    """What this machine has copied."""

    writers: list[str]
    """The names under which it wrote."""
    committed: list[str]
    """The manifests that it has written or found there, as names of objects."""
    sent: dict[str, list[int]]
    """Of each other file its time and its size as it was sent."""


class Brought(TypedDict):
    """What was brought: who wrote it, and of each object the text that changes with it."""

    writer: str
    objects: dict[str, str]


def wrote(run: Path) -> set[str]:
    """The names under which launches of this machine have copied the run."""
    return set(_copied(run)["writers"])


def _copied(run: Path) -> _Copied:
    try:
        return read_document(run / COPIED, _Copied)
    except (OSError, BadDocument):
        return {"writers": [], "committed": [], "sent": {}}


def brought_of(run: Path) -> Brought:
    """What was brought into the folder of the run."""
    try:
        return read_document(run / BROUGHT, Brought)
    except (OSError, BadDocument):
        return {"writer": "", "objects": {}}


class Sender:
    """Copies the run in the folder `run` to `store`, whose address ends with the name of the run.

    Raises UserError (2) where another launch has written there since, and Busy.
    """

    def __init__(self, run: Path, store: Store) -> None:
        self.run, self.store = run, store
        self._lock = open_beneath(run / LOCK, os.O_RDWR | os.O_CREAT)
        if not take_lock(self._lock, patience=0):
            os.close(self._lock)
            raise Busy(f"another process copies {run}")
        self._kept = _copied(run)
        self._committed = {name: store.read(name) or b"" for name in self._kept["committed"]}
        self._name = secrets.token_hex(8)
        self._require_writer(*self._kept["writers"], brought_of(run)["writer"])
        # Here first: a launch that is killed between the two must not take the store for another machine's.
        self._kept["writers"].append(self._name)
        self._keep()
        store.write(WRITER, self._name.encode())

    def send(self) -> None:
        """Copy all that is new: figures first, data before the manifest that commits it, the record last."""
        self._require_writer(self._name)
        there, manifests = self.store.names(), self._manifests()
        for path in sorted(self.run.rglob("*")):
            if path.is_file() and not path.is_symlink() and path.name not in _LOCAL and self._is_plain(path):
                self._send_file(path)
        for manifest in manifests:
            with contextlib.suppress(FileNotFoundError):  # one that was removed meanwhile is superseded
                self._send_checkpoint(manifest, f"{CHECKPOINTS}/{manifest.name}" in there)
        for name in _POINTERS:
            pointer = self.run / CHECKPOINTS / name
            step = pointed_step(pointer)
            if step is not None and any(step_of_manifest(Path(each).name) == step for each in self._committed):
                self._send_file(pointer)
        self._send_file(self.run / _RECORD)
        self._remove_superseded()
        self._keep()

    def close(self) -> None:
        """Let other processes copy the run."""
        os.close(self._lock)

    def _manifests(self) -> list[Path]:
        """The manifests here, the newest first: a slow store then has the newest checkpoint that it can have."""
        found = (self.run / CHECKPOINTS).glob("step-*.json")
        return sorted((path for path in found if step_of_manifest(path.name) is not None), reverse=True)

    def _is_plain(self, path: Path) -> bool:
        return path.parent.name != CHECKPOINTS and target_of(path.name) is None

    def _send_checkpoint(self, manifest: Path, is_there: bool) -> None:
        name, content = f"{CHECKPOINTS}/{manifest.name}", read_file(manifest)
        if self._committed.get(name) == content:
            return
        if not is_there or self.store.read(name) != content:
            try:
                parts = read_manifest(manifest).data
            except Damaged:
                return
            with contextlib.ExitStack() as opened:
                # All are open before the first is sent, since training may remove them while a slow store takes them.
                files = {part.file: opened.enter_context(open_file(manifest.parent / part.file)) for part in parts}
                if is_there:
                    self.store.remove(name)
                for file, data in files.items():
                    self.store.send(f"{CHECKPOINTS}/{file}", data.fileno())
            self.store.write(name, content)
        self._committed[name] = content

    def _send_file(self, path: Path) -> None:
        name = str(path.relative_to(self.run))
        with contextlib.suppress(FileNotFoundError), open_file(path) as file:
            facts = os.fstat(file.fileno())
            if self._kept["sent"].get(name) != (state := [facts.st_mtime_ns, facts.st_size]):
                self.store.send(name, file.fileno())
                self._kept["sent"][name] = state

    def _remove_superseded(self) -> None:
        """Remove checkpoints that training has removed here since they were copied, but never the newest one there."""
        newest = max(self._committed, default="")
        for name in sorted(self._committed.keys() - {newest}):
            if (self.run / name).exists() or not (self.run / _RECORD).exists():
                continue
            self.store.remove(name)
            content = json.loads(self._committed.pop(name) or b"{}")
            for part in content.get("parts") or ([content] if content else []):
                self.store.remove(f"{CHECKPOINTS}/{part['file']}")

    def _require_writer(self, *names: str) -> None:
        there = self.store.read(WRITER)
        if there is not None and there.decode(errors="replace") not in names:
            raise UserError(
                f"{self.store.address}: another launch has gone on with this run, so this one copies nothing more; "
                f"what it has trained is in {self.run}"
            )

    def _keep(self) -> None:
        self._kept["committed"] = sorted(self._committed)
        replace_file(self.run / COPIED, json.dumps(self._kept), durable=True)

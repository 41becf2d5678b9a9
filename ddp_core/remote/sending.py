"""Copies a run directory to a store, where a reader finds each checkpoint whole or not at all.

One writer at a time: an object `writer` names the launch that copies, and a launch that finds another name there copies
no more. `stored.json` in the local folder keeps the names from which it descends: where the store's is none of them,
or where the store has more than a copy that was brought, another machine has gone on with the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path, PurePosixPath

from typing_extensions import TypedDict

from ddp_core.base.beneath import open_beneath, open_file, read_file
from ddp_core.base.documents import BadDocument, read_document
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import replace_file, take_lock, target_of
from ddp_core.checkpoint import read_checkpoint
from ddp_core.checkpoint.manifest import DataPart, pointed_step, step_of_data, step_of_manifest
from ddp_core.remote.store import Store

WRITER = "writer"
STORED = "stored.json"
LOCK = "stored.lock"
RECORD = "run.json"
CHECKPOINTS = "checkpoints"
OF_THIS_MACHINE = {STORED, LOCK, "run.lock", "fence.lock"}
"""Files at the top of a run directory that are not copied."""
_POINTERS = ("latest.json", "best.json")


class Superseded(UserError):
    """Another launch has gone on with the run."""


class Stored(TypedDict):
    """What this machine knows of a run in the store."""

    names: list[str]
    """The writers from whose run the local one descends, this machine's own among them."""
    committed: list[str]
    """The manifests that this machine has written or found there, as names of objects."""
    sent: dict[str, list[int]]
    """Of each other file its time and its size when it was sent."""
    is_copy: bool
    """Whether it was brought, and nothing of it was copied back yet."""


def stored_of(run: Path) -> Stored:
    """What this machine knows of the run in the store; nothing where it has never been there."""
    try:
        return read_document(run / STORED, Stored)
    except (OSError, BadDocument):
        return {"names": [], "committed": [], "sent": {}, "is_copy": False}


def keep(run: Path, stored: Stored) -> None:
    """Note it, also for after a power cut."""
    replace_file(run / STORED, json.dumps(stored), durable=True)


def is_superseded(store: Store, run: Path) -> bool:
    """Whether a launch has written the store's run from which the local one does not descend."""
    writer, stored = writer_of(store), stored_of(run)
    if writer is None:
        return False
    return writer not in stored["names"] or (stored["is_copy"] and not manifests_in(store) <= {*stored["committed"]})


def writer_of(store: Store) -> str | None:
    """The name of the launch that copies to the store; None where none has."""
    name = store.read(WRITER)
    return None if name is None else name.decode(errors="replace")


def manifests_in(store: Store) -> set[str]:
    """The names of the manifests in the store."""
    return {name for name in store.names() if is_manifest(name)}


def is_manifest(name: str) -> bool:
    """Whether an object of this name commits a checkpoint."""
    path = PurePosixPath(name)
    return path.parts[:-1] == (CHECKPOINTS,) and step_of_manifest(path.name) is not None


class Sender(contextlib.AbstractContextManager["Sender"]):
    """Copies the run in the folder `run` to `store`, whose address ends with the name of the run; a context manager.

    Raises Superseded, and UserError (4) where the store cannot be reached or another process of this machine copies.
    """

    def __init__(self, run: Path, store: Store) -> None:
        self.run, self.store = run, store
        self._lock = open_beneath(run / LOCK, os.O_RDWR | os.O_CREAT)
        try:
            if not take_lock(self._lock):
                raise UserError(f"another process still copies {run}", ExitCode.RESOURCES)
            self._stored = stored_of(run)
            self._name = secrets.token_hex(8)
            if is_superseded(store, run):
                raise self._superseded()
            # Here first: a launch that is killed between the two must not take the store for another machine's.
            self._stored["names"].append(self._name)
            self._stored["is_copy"] = False
            keep(run, self._stored)
            store.write(WRITER, self._name.encode())
            found = {name: store.read(name) for name in self._stored["committed"]}
            self._committed = {name: content for name, content in found.items() if content is not None}
        except BaseException:
            os.close(self._lock)
            raise

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def send(self) -> None:
        """Copy all that is new: figures first, data before the manifest that commits it, the record last."""
        self._require_writer()
        there, found = self.store.names(), (self.run / CHECKPOINTS).glob("step-*.json")
        # The newest first: a slow store then has the newest checkpoint that it can have.
        manifests = sorted((path for path in found if step_of_manifest(path.name) is not None), reverse=True)
        for path in sorted(self.run.rglob("*")):
            name = path.relative_to(self.run)
            is_apart = name.parts[0] == CHECKPOINTS or str(name) in {*OF_THIS_MACHINE, RECORD}
            if not is_apart and target_of(path.name) is None and path.is_file() and not path.is_symlink():
                self._send_file(str(name), there)
        for manifest in manifests:
            with contextlib.suppress(FileNotFoundError):  # one that was removed meanwhile is superseded
                self._send_checkpoint(manifest, there)
        self._require_writer()
        steps = {step_of_manifest(PurePosixPath(name).name) for name in self._committed}
        for pointer in _POINTERS:
            if pointed_step(self.run / CHECKPOINTS / pointer) in steps:
                self._send_file(f"{CHECKPOINTS}/{pointer}", there)
        self._send_file(RECORD, there)
        self._stored["committed"] = sorted(self._committed)
        keep(self.run, self._stored)
        self._remove_superseded(self.store.names())

    def _send_checkpoint(self, manifest: Path, there: set[str]) -> None:
        name, content = f"{CHECKPOINTS}/{manifest.name}", read_file(manifest)
        if name in there and self._committed.get(name) == content:
            return
        before = self.store.read(name) if name in there else None
        if before != content:
            if (parts := data_of(manifest)) is None:
                return
            old, new = _named_in(before), {part.file: part.sha256 for part in parts}
            with contextlib.ExitStack() as opened:
                # All files are opened before the first is sent: training may remove them during a slow upload.
                files = {each: opened.enter_context(open_file(manifest.parent / each)) for each in new}
                if read_file(manifest) != content:
                    return
                self._require_writer()
                if any(each in old and old[each] != new[each] for each in new):
                    # The manifest there must not commit data that is about to be overwritten.
                    self.store.remove(name)
                    self._committed.pop(name, None)
                for each, data in files.items():
                    if old.get(each) != new[each]:
                        self.store.send(f"{CHECKPOINTS}/{each}", data.fileno())
            self._require_writer()
            self.store.write(name, content)
            for each in old.keys() - new.keys():
                with contextlib.suppress(UserError):
                    self.store.remove(f"{CHECKPOINTS}/{each}")
        self._committed[name] = content

    def _send_file(self, name: str, there: set[str]) -> None:
        with contextlib.suppress(FileNotFoundError, PermissionError), open_file(self.run / name) as file:
            facts = os.fstat(file.fileno())
            if self._stored["sent"].get(name) != (state := [facts.st_mtime_ns, facts.st_size]) or name not in there:
                self.store.send(name, file.fileno())
                self._stored["sent"][name] = state

    def _remove_superseded(self, there: set[str]) -> None:
        """Remove checkpoints that training has removed here since they were copied, where a newer one is there.

        Where the store lets nothing be removed, they stay.
        """
        newest = max(there & self._committed.keys(), default="")
        gone = [name for name in sorted(self._committed) if not (self.run / name).exists()]
        if not gone or newest <= max(gone):
            return
        self._require_writer()
        for name in gone:
            with contextlib.suppress(UserError):
                self.store.remove(name)
                for each in _named_in(self._committed.pop(name)):
                    self.store.remove(f"{CHECKPOINTS}/{each}")

    def _require_writer(self) -> None:
        if writer_of(self.store) not in (None, self._name):
            raise self._superseded()

    def _superseded(self) -> Superseded:
        return Superseded(
            f"{self.store.address}: another launch has gone on with this run, so this one copies nothing more; "
            f"what it has trained is in {self.run}",
            ExitCode.RESOURCES,
        )


def data_of(manifest: Path) -> tuple[DataPart, ...] | None:
    """The data files of a checkpoint; None where it is damaged, or its data is not whole."""
    with contextlib.suppress(UserError):
        return read_checkpoint(manifest).data
    return None


def _named_in(manifest: bytes | None) -> dict[str, str]:
    """The data files of a manifest that lies in the store, where anybody may have written it, with their digests."""
    with contextlib.suppress(ValueError, AttributeError, KeyError, TypeError):
        content = json.loads(manifest or b"{}")
        named = {part["file"]: str(part["sha256"]) for part in content.get("parts") or [content]}
        return {name: digest for name, digest in named.items() if step_of_data(name) is not None}
    return {}


def has_more(run: Path, store: Store) -> bool:
    """Whether the local run has something that was not copied yet, and the store's was not removed by somebody."""
    stored = stored_of(run)
    if stored["sent"] and writer_of(store) is None:
        return False
    manifests = (run / CHECKPOINTS).glob("step-*.json")
    here = {f"{CHECKPOINTS}/{path.name}" for path in manifests if data_of(path) is not None}
    facts = (run / RECORD).stat()
    return not here <= {*stored["committed"]} or stored["sent"].get(RECORD) != [facts.st_mtime_ns, facts.st_size]

"""The writer: saves one checkpoint at a time, at once or in the background; one rename commits it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast

import torch
from torch import Tensor

from ddp_core.checkpoint import manifest as manifests
from ddp_core.checkpoint.fence import Fence, Superseded
from ddp_core.checkpoint.files import At, DataFile, disk_full, free_bytes, human_bytes, write_error
from ddp_core.checkpoint.manifest import Checkpoint, Damaged
from ddp_core.checkpoint.state import Snapshots, Tree, on_cpu
from ddp_core.files import NewFile, sync_directory

WRITER_NICENESS = 5


class Checkpointer:
    """Writes the checkpoints of one run into `directory`; only one process (rank 0) may have a Checkpointer.

    keep_last: how many of the newest checkpoints stay; the best one and every `keep_every`-th step stay too.
    asynchronous: `save` copies the state and returns, and a thread writes it. The next `save`, `wait` or `close` waits
    for the thread; its error is raised by the next `check`, `save`, `wait` or `close`.
    fence: a Fence, or any callable that raises or returns False when this process may no longer write.
    on_event: receives one line per event, from the writing thread where there is one.
    at: called with each of `files.POINTS` right after it is reached.

    Raises UserError (4) where the directory cannot be made or written, the disk is full, or a limit of the system is
    reached; earlier checkpoints stay as they were. Raises Superseded when a newer writer has taken the fence.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep_last: int = 2,
        keep_every: int | None = None,
        asynchronous: bool = False,
        fence: Fence | Callable[[], object] | None = None,
        on_event: Callable[[str], None] = lambda line: None,
        at: At = lambda point: None,
    ) -> None:
        if keep_last < 1 or (keep_every is not None and keep_every < 1):
            raise ValueError(f"keep_last and keep_every count from 1, got {keep_last} and {keep_every}")
        self.directory = Path(directory)
        self.asynchronous = asynchronous
        self.last: Checkpoint | None = None
        """The newest checkpoint that this object has committed."""
        self._keep_last, self._keep_every = keep_last, keep_every
        self._fence, self._on_event, self._at = fence, on_event, at
        self._snapshots = Snapshots()
        self._writer: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._stall = 0.0
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with NewFile(self.directory / "latest.json"):
                pass
        except OSError as error:
            raise write_error(error, self.directory) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        try:
            self.close()
        except Exception as second:  # the error that ended the block is the one to raise
            self._on_event(f"warning: the last checkpoint failed too: {second}")

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Make buffers and thread for asynchronous saves of `state`, so that the first is as quick as the others."""
        self.wait()
        self._submit(time.sleep, 0)
        self._snapshots.copy(Tree(state))
        self._snapshots.ready()

    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        epoch: int,
        metadata: Mapping[str, Any] | None = None,
        metric: float | None = None,
        best: bool = False,
        changing: Iterable[Tensor] | None = None,
    ) -> None:
        """Commit `state` as the checkpoint of `step`; an asynchronous save returns as soon as `state` is copied.

        state: nested dict, list and tuple of dense tensors and plain JSON values; TypeError names the key of anything
        else. metadata: a JSON object for the manifest, readable without the tensors. metric: for the manifest; NaN and
        Inf become null. best: let `best.json` point to this checkpoint. changing: only for a caller that calls
        `before_update` before it changes any other tensor: the tensors that change earlier, such as batch-norm
        statistics in a forward. An asynchronous save then copies only these at once, and the rest while training goes
        on.
        """
        self.wait()
        with self._current():
            pass
        started = time.perf_counter()
        tree = Tree(state)
        record = {
            "step": step,
            "epoch": epoch,
            "metadata": json.loads(json.dumps(dict(metadata or {}), allow_nan=False)),
            "metric": metric if metric is not None and math.isfinite(metric) else None,
            "shapes": tree.shapes,
        }
        needed = tree.bytes_needed()
        path = self.directory / f"{manifests.stem(step)}.pt"
        try:
            available = free_bytes(self.directory)
        except OSError as error:
            raise write_error(error, path) from error
        if available < needed:
            raise disk_full(path, needed, available)
        if not self.asynchronous:
            self._write(on_cpu(tree), record, best, needed, started)
            return
        copied = self._snapshots.copy(tree) if changing is None else self._snapshots.begin(tree, changing)
        self._stall = time.perf_counter() - started
        self._pending = self._submit(self._write_aside, copied, record, best, needed, started)

    def before_update(self) -> None:
        """Return when the tensors given to the last `save` may change; cheap enough for every step.

        CUDA tensors may change by what the current stream does next, which waits on the device for their copies.
        """
        if not self._snapshots.arrived:
            started = time.perf_counter()
            self._snapshots.carry_on()
            self._stall += time.perf_counter() - started
        self._snapshots.let_change()

    def check(self) -> None:
        """Raise the error of an asynchronous save, if there was one; cheap enough for every step."""
        if self._pending is not None and self._pending.done():
            finished, self._pending = self._pending, None
            finished.result()

    def wait(self) -> None:
        """Return when nothing is being written any more; raise the error of an asynchronous save, if there was one."""
        if self._pending is not None:
            finished, self._pending = self._pending, None
            finished.result()

    def close(self) -> None:
        """Wait as `wait` does, then end the thread and free the buffers."""
        try:
            self.wait()
        finally:
            if self._writer is not None:
                self._writer.shutdown()
                self._writer = None
            self._snapshots = Snapshots()

    def _submit(self, function: Callable[..., None], *arguments: Any) -> Future[None]:
        if self._writer is None:
            # Python joins the pool's thread at exit: a program that ends right after a save still finishes it.
            self._writer = ThreadPoolExecutor(1, "checkpoint-writer", initializer=_lower_priority)
        return self._writer.submit(function, *arguments)

    def _write_aside(self, state: Any, record: dict[str, Any], best: bool, needed: int, started: float) -> None:
        self._snapshots.carry_on()
        self._snapshots.ready()
        self._write(state, record, best, needed, started)

    def _write(self, state: Any, record: dict[str, Any], best: bool, needed: int, started: float) -> None:
        step: int = record["step"]
        target = self._free_name(step)
        try:
            try:
                checkpoint, replaced = self._commit(state, record, target)
            except BaseException:
                # The disk is asked, not a variable: an interrupt can come right after the rename that commits.
                with contextlib.suppress(OSError):
                    if manifests.uncommitted(target):
                        target.unlink()
                raise
            sync_directory(self.directory)
            self._at("directory synced")
            self._point("latest", checkpoint)
            if best:
                self._point("best", checkpoint)
            self.last = checkpoint
            self._prune(checkpoint, replaced)
        except Superseded as error:
            self._on_event(f"warning: checkpoint of step {step} given up: {error}")
            raise
        except OSError as error:
            raise write_error(error, target, needed) from error
        seconds = time.perf_counter() - started
        stalled = f", training stood still for {self._stall:.3f} s" if self.asynchronous else ""
        self._on_event(f"checkpoint of step {step}: {human_bytes(checkpoint.bytes)} in {seconds:.3f} s{stalled}")

    def _commit(self, state: Any, record: dict[str, Any], target: Path) -> tuple[Checkpoint, str | None]:
        """Write data, then manifest; return the checkpoint and the data file that it made superfluous."""
        with DataFile(target) as data:
            self._at("data opened")
            data.on_first_write = lambda: self._at("data partly written")
            torch.save(state, cast("IO[bytes]", data))
            data.raise_write_error()
            self._at("data written")
            data.sync()
            self._at("data synced")
            with self._current():
                data.rename()
            # A power cut could otherwise keep the manifest's name alone: a checkpoint without data.
            sync_directory(self.directory)
            self._at("data renamed")
            checkpoint = Checkpoint(
                directory=self.directory,
                file=target.name,
                bytes=data.written,
                sha256=data.sha256,
                written_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                **record,
            )
            replaced = None
            with contextlib.suppress(OSError, Damaged):
                replaced = manifests.read_manifest(checkpoint.manifest).file
            with NewFile(checkpoint.manifest) as manifest:
                self._at("manifest opened")
                manifest.write(manifests.encode(checkpoint))
                self._at("manifest written")
                manifest.sync()
                self._at("manifest synced")
                with self._current():
                    manifest.rename()
            self._at("manifest renamed")
        return checkpoint, replaced

    def _free_name(self, step: int) -> Path:
        """An unused name for the data file of `step`: an earlier file stays whole until the new manifest is there."""
        stem, count = manifests.stem(step), 1
        target = self.directory / f"{stem}.pt"
        while target.exists():
            count += 1
            target = self.directory / f"{stem}-{count}.pt"
        return target

    def _point(self, name: str, checkpoint: Checkpoint) -> None:
        content = {
            "format": manifests.FORMAT,
            "step": checkpoint.step,
            "manifest": checkpoint.manifest.name,
            "metric": checkpoint.metric,
        }
        with NewFile(self.directory / f"{name}.json") as pointer:
            pointer.write(json.dumps(content).encode() + b"\n")
            pointer.sync()
            self._at(f"{name} synced")
            with self._current():
                pointer.rename()
            self._at(f"{name} renamed")
        sync_directory(self.directory)

    def _prune(self, newest: Checkpoint, replaced: str | None) -> None:
        if replaced is not None and replaced != newest.file:
            (self.directory / replaced).unlink(missing_ok=True)
        found = {}
        for path in self.directory.iterdir():
            step = manifests.step_of_manifest(path.name)
            # Checkpoints of later steps are left alone: they are damaged ones that were passed over, or not this run's.
            if step is not None and step <= newest.step:
                found[step] = path
        sound, names = [], {}
        for step, path in sorted(found.items(), reverse=True):
            with contextlib.suppress(OSError, Damaged):
                checkpoint = manifests.read_manifest(path)
                names[step] = checkpoint.file
                manifests.require_data(checkpoint)
                sound.append(step)
        keep = {*sound[: self._keep_last], manifests.pointed_step(self.directory / "best.json")}
        for step in sorted(found.keys() - keep):
            if self._keep_every is not None and step % self._keep_every == 0:
                continue
            with self._current():
                found[step].unlink(missing_ok=True)
                self._at("old manifest removed")
                (self.directory / names.get(step, f"{manifests.stem(step)}.pt")).unlink(missing_ok=True)
                self._at("old data removed")

    def _current(self) -> AbstractContextManager[None]:
        """A block during which no other process may write; raises Superseded where this process may not."""
        if isinstance(self._fence, Fence):
            return self._fence.holding()
        if self._fence is not None and self._fence() is False:
            raise Superseded(
                f"this process may no longer write to {self.directory}; it ends now and has left the files there as "
                "they were"
            )
        return contextlib.nullcontext()


def _lower_priority() -> None:
    if sys.platform == "linux":  # where a thread has a niceness of its own
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WRITER_NICENESS)

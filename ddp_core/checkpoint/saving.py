"""The Checkpointer, which saves one checkpoint at a time, at once or in the background; one rename commits it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from ddp_core.base.documents import parse_document
from ddp_core.base.files import NewFile, make_directory
from ddp_core.base.refusals import human_bytes, refused
from ddp_core.checkpoint.committing import At, CheckpointFiles
from ddp_core.checkpoint.fence import Fence, Superseded
from ddp_core.checkpoint.manifest import Checkpoint
from ddp_core.checkpoint.parts import part_of
from ddp_core.checkpoint.ranks import Ranks, telling_others
from ddp_core.checkpoint.state import Shapes, Snapshots, StateTensors

WRITER_NICENESS = 5


class Checkpointer(contextlib.AbstractContextManager["Checkpointer"]):
    """Writes the checkpoints of one run into `directory`; only one process (rank 0) may have a Checkpointer.

    keep_last: how many of the newest checkpoints stay; the best one and every `keep_every`-th step stay too, or every
    step that one of several such numbers divides.
    asynchronous: `save` copies the state and returns, and a thread writes it. The next `save`, `wait` or `close` waits
    for the thread; its error is raised by the next `check`, `save`, `wait` or `close`.
    fence: a Fence, or any callable that raises or returns False when this process may no longer write.
    ranks: given where every rank has a Checkpointer of the same directory, and saves the same steps. Each writes a data
    file with its pieces of the CutTensors in the state; the first one writes the rest of the state, and commits all
    files or none. An error of one rank is raised on all.
    synced_before: files and folders that are to be on the disk, as they are then, before a checkpoint is committed.
    on_event: receives one line per event, from the writing thread where there is one.
    at: for tests; called with each of `committing.POINTS` right after it is reached, with `ranks` also with each of
    `committing.POINTS_OF_PARTS`.

    Raises UserError (4) where the directory cannot be made or written, the disk is full, or a limit of the system is
    reached; earlier checkpoints stay as they were. Raises Superseded when a newer writer has taken the fence.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep_last: int = 2,
        keep_every: int | Sequence[int] | None = None,
        asynchronous: bool = False,
        fence: Fence | Callable[[], object] | None = None,
        ranks: Ranks | None = None,
        synced_before: Sequence[Path] = (),
        on_event: Callable[[str], None] = lambda line: None,
        at: At = lambda point: None,
    ) -> None:
        every = () if keep_every is None else (keep_every,) if isinstance(keep_every, int) else tuple(keep_every)
        if min((keep_last, *every)) < 1:
            raise ValueError(f"keep_last and keep_every count from 1, got {keep_last} and {keep_every}")
        self.directory = Path(directory)
        self.asynchronous = asynchronous
        self.last: Checkpoint | None = None
        """The newest checkpoint that this object has committed."""
        self._files = CheckpointFiles(self.directory, keep_last, every, fence, ranks, synced_before, at)
        self._ranks, self._on_event = ranks, on_event
        self._snapshots = Snapshots()
        self._writer: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._stall = 0.0
        try:
            if not self.directory.is_dir():
                make_directory(self.directory)
            with NewFile(self.directory / "latest.json", self._files.root):
                pass
        except OSError as error:
            raise refused(error, self.directory) from error

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
        self._snapshots.copy(self._own_tensors(state)[0])
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

        state: nested dict, list and tuple of dense tensors (with `ranks` also CutTensors) and plain values;
        TypeError names the key of anything else. metadata: a JSON object for the manifest, readable without the
        tensors. metric: for the manifest; NaN and Inf become null. best: let `best.json` point to this checkpoint.
        changing: only for a caller that calls `before_update` before it changes any other tensor: the tensors that
        change earlier, such as batch-norm statistics in a forward. An asynchronous save then copies only these at once,
        and the rest while training goes on.
        """
        self.wait()
        started = time.perf_counter()
        with telling_others(self._ranks):
            with self._files.only_writer():
                pass
            own, shapes = self._own_tensors(state)
            record = {
                "step": step,
                "epoch": epoch,
                # As it will be read back. Raises TypeError or ValueError for what cannot be.
                "metadata": parse_document(json.dumps(dict(metadata or {}), allow_nan=False), dict[str, Any]),
                "metric": metric if metric is not None and math.isfinite(metric) else None,
                "shapes": shapes,
            }
            needed = own.bytes_needed()
            self._files.require_room(step, needed)
        if not self.asynchronous:
            self._write(own.state_on_cpu(), record, best, needed, started)
            return
        copied = self._snapshots.copy(own, changing)
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
            self.wait()

    def hold(self, steps: Collection[int]) -> None:
        """Let the checkpoints of these steps, and no others, stay beside those that stay by themselves."""
        self._files.held = frozenset(steps)

    def let_go(self) -> None:
        """Hold none any more; where some were, wait as `wait` does, and remove those that were only held."""
        if self._files.held:
            self.wait()
            self._files.held = frozenset()
            if self.last is not None:
                self._files.prune(self.last)

    def is_writing(self, seconds: float = 0.0) -> bool:
        """Whether an asynchronous save is still being written after so many seconds."""
        return self._pending is not None and bool(wait([self._pending], seconds).not_done)

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

    def _own_tensors(self, state: Any) -> tuple[StateTensors, Shapes]:
        """What this process writes of a state, and the shapes of the whole state's tensors."""
        if self._ranks is None:
            own = StateTensors(state)
            return own, own.shapes
        content, shapes = part_of(state, self._ranks.is_first)
        return StateTensors(content), shapes

    def _submit(self, function: Callable[..., None], *arguments: Any) -> Future[None]:
        if self._writer is None:
            # Python joins the pool's thread at exit: a program that ends right after a save still finishes it.
            self._writer = ThreadPoolExecutor(1, "checkpoint-writer", initializer=_lower_priority)
        return self._writer.submit(function, *arguments)

    def _write_aside(self, state: Any, record: dict[str, Any], best: bool, needed: int, started: float) -> None:
        with telling_others(self._ranks):
            self._snapshots.carry_on()
            self._snapshots.ready()
        self._write(state, record, best, needed, started)

    def _write(self, state: Any, record: dict[str, Any], best: bool, needed: int, started: float) -> None:
        step = record["step"]
        try:
            checkpoint = self._files.write(state, record, best, needed)
        except Superseded as error:
            self._on_event(f"warning: checkpoint of step {step} given up: {error}")
            raise
        if checkpoint is None:
            return
        self.last = checkpoint
        seconds = time.perf_counter() - started
        stalled = f", training stood still for {self._stall:.3f} s" if self.asynchronous else ""
        self._on_event(f"checkpoint of step {step}: {human_bytes(checkpoint.bytes)} in {seconds:.3f} s{stalled}")


def _lower_priority() -> None:
    if sys.platform == "linux":  # where a thread has a niceness of its own
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + WRITER_NICENESS)

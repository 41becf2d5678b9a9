"""The files of a checkpoint, written in the sequence that keeps it whole or not there; and the removal of old ones."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import torch

from ddp_core.base.beneath import remove_beneath
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import NewFile, sync
from ddp_core.base.refusals import disk_full, refused
from ddp_core.checkpoint import manifest as manifests
from ddp_core.checkpoint.fence import Fence, Superseded
from ddp_core.checkpoint.manifest import Checkpoint, Damaged, DataPart
from ddp_core.checkpoint.ranks import Ranks, told

Result = TypeVar("Result")

POINTS = (
    "data opened",
    "data partly written",
    "data written",
    "data synced",
    "data renamed",
    "manifest opened",
    "manifest written",
    "manifest synced",
    "manifest renamed",
    "directory synced",
    "latest synced",
    "latest renamed",
    "best synced",
    "best renamed",
    "old manifest removed",
    "old data removed",
)
"""The points of a save, in order. A `Checkpointer(at=…)` calls `at(point)` right after each; tests kill it there."""

POINTS_OF_PARTS = ("parts reported", "outcome told")
"""Two more points where several ranks save together: one after "data renamed", and the last of all."""

At = Callable[[str], None]
"""Called with the name of a point."""


class DataFile(NewFile):
    """A NewFile that is hashed while `torch.save` writes into it.

    The first OSError of a `write` is kept in `error`, because `torch.save` would replace it by a message about
    "unexpected pos".
    """

    def __init__(self, target: Path, root: Path | None = None) -> None:
        super().__init__(target, root)
        self.written = 0
        self.on_first_write: Callable[[], None] | None = None
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Append `data`, unless a `write` has failed before; return its length in bytes."""
        view = memoryview(data).cast("B")
        if self.error is None:
            self.digest.update(view)
            try:
                super().write(view)
            except OSError as error:
                self.error = error
            self.written += len(view)
            if self.on_first_write is not None:
                self.on_first_write()
                self.on_first_write = None
        return len(view)

    def flush(self) -> None:
        """Do nothing, as nothing is buffered here; `torch.save` needs the method."""


@dataclass(eq=False)
class CheckpointFiles:
    """Writes and removes the files of the checkpoints in `directory`; the arguments are those of a `Checkpointer`."""

    directory: Path
    _keep_last: int
    _keep_every: Sequence[int]
    _fence: Fence | Callable[[], object] | None
    _ranks: Ranks | None
    _synced_before: Sequence[Path]
    _at: At
    held: frozenset[int] = frozenset()
    """Checkpoints of these steps stay, too, beside the newest ones, those of `keep_every`, and the best one."""

    def __post_init__(self) -> None:
        # What lies in a run directory is reached through no link beneath it, such as its folder of checkpoints.
        is_in_run = isinstance(self._fence, Fence) and self.directory.is_relative_to(self._fence.directory)
        self.root = self._fence.directory if isinstance(self._fence, Fence) and is_in_run else self.directory

    def only_writer(self) -> AbstractContextManager[None]:
        """A block during which no other process may write; raises Superseded where this process may not."""
        if isinstance(self._fence, Fence):
            return self._fence.holding()
        if self._fence is not None and self._fence() is False:
            raise Superseded(
                f"this process may no longer write to {self.directory}; it ends now and has left the files there as "
                "they were"
            )
        return contextlib.nullcontext()

    def require_room(self, step: int, needed: int) -> None:
        """Raise UserError (4) unless the disk has room for this process's data file of `step`, of `needed` bytes."""
        path = self._free_name(step)
        try:
            available = shutil.disk_usage(self.directory).free
        except OSError as error:
            raise refused(error, path) from error
        if available < needed:
            raise disk_full(path, needed, available)

    def write(self, state: Any, record: dict[str, Any], best: bool, needed: int) -> Checkpoint | None:
        """Write and commit one checkpoint, then remove old ones.

        `state`: what this process's data file holds, in about `needed` bytes, which a message about a full disk names.
        `record`: the fields of the manifest that describe the state. Where several ranks write together, the first one,
        which commits, returns the checkpoint, the others None.
        """
        target = self._free_name(record["step"])
        try:
            if self._ranks is not None:
                return self._write_together(self._ranks, target, state, record, best, needed)
            with self._data(target, state) as data:
                return self._commit([data], record, best)
        except BaseException as error:
            if self._ranks is None:
                # The disk is asked, not a variable: an interrupt can come right after the rename that commits.
                with contextlib.suppress(OSError):
                    if manifests.uncommitted(target):
                        remove_beneath(target, self.root)
            if isinstance(error, OSError):
                raise refused(error, target, needed) from error
            raise

    def _write_together(
        self, ranks: Ranks, target: Path, state: Any, record: dict[str, Any], best: bool, needed: int
    ) -> Checkpoint | None:
        """Write this rank's data file, report it to all ranks, let the first rank commit, and hear how that ended.

        An error of one rank is raised on all, and then nothing is committed, unless the error came after the commit.
        Where a rank cannot hear how it ended, its file is left to `sweep`, as the first rank may have committed it.
        """
        with contextlib.ExitStack() as locked:
            part, problem = _tried(lambda: locked.enter_context(self._data(target, state)), target, needed)
            reports = ranks.gather(part if problem is None else told(problem, ranks.place))
            self._at("parts reported")
            problems = [report for report in reports if isinstance(report, Exception)]
            checkpoint, is_committed = None, False
            if not problems:
                parts = [report for report in reports if isinstance(report, DataPart)]
                if ranks.is_first:
                    checkpoint, problem = _tried(lambda: self._commit(parts, record, best), target, needed)
                message = None if problem is None else told(problem, ranks.place)
                is_committed, message = ranks.hear_first(
                    (ranks.is_first and not manifests.uncommitted(target), message)
                )
                self._at("outcome told")
                problems = [] if message is None else [message]
        if not is_committed:
            with contextlib.suppress(OSError):
                remove_beneath(target, self.root)
        if problem is not None and not isinstance(problem, UserError):
            raise problem
        if problems:
            raise problems[0] from problem
        return checkpoint

    def _free_name(self, step: int) -> Path:
        """An unused name for a data file of `step`: an earlier file stays whole until the new manifest is there."""
        part = None if self._ranks is None else (self._ranks.rank, self._ranks.count)
        version = 1
        while (target := self.directory / manifests.data_name(step, version, part)).exists():
            version += 1
        return target

    @contextlib.contextmanager
    def _data(self, target: Path, state: Any) -> Iterator[DataPart]:
        """Write a data file, not yet committed; inside the block it is on the disk, under its name, and locked."""
        with DataFile(target, self.root) as data:
            self._at("data opened")
            data.on_first_write = lambda: self._at("data partly written")
            torch.save(state, cast("IO[bytes]", data))
            if data.error is not None:
                raise data.error
            self._at("data written")
            data.sync()
            self._at("data synced")
            with self.only_writer():
                data.rename()
            # A power cut could otherwise keep the manifest's name alone: a checkpoint without data.
            sync(self.directory)
            self._at("data renamed")
            yield DataPart(target.name, data.written, data.digest.hexdigest())

    def _commit(self, parts: Sequence[DataPart], record: dict[str, Any], best: bool) -> Checkpoint:
        """Write the manifest, whose renaming commits the data files, then the pointers; remove old checkpoints.

        Raises UserError (4) where several ranks have written the files, and this one does not see one of them.
        """
        together = parts[0]
        if self._ranks is not None:
            for rank, part in enumerate(parts):
                try:
                    manifests.require_size(part, (self.directory / part.file).stat().st_size)
                except (OSError, Damaged):
                    raise UserError(
                        f"rank {rank} has written {part.file}, but rank 0 does not see it in {self.directory}: give "
                        "all nodes one output directory that they share",
                        ExitCode.RESOURCES,
                    ) from None
            together = manifests.taken_together(parts)
        checkpoint = Checkpoint(
            directory=self.directory,
            file=together.file,
            bytes=together.bytes,
            sha256=together.sha256,
            written_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            parts=() if self._ranks is None else tuple(parts),
            **record,
        )
        replaced: tuple[DataPart, ...] = ()
        with contextlib.suppress(OSError, Damaged):
            replaced = manifests.read_manifest(checkpoint.manifest).data
        for path in self._synced_before:
            sync(path)
        with NewFile(checkpoint.manifest, self.root) as manifest:
            self._at("manifest opened")
            manifest.write(manifests.encode(checkpoint))
            self._at("manifest written")
            manifest.sync()
            self._at("manifest synced")
            with self.only_writer():
                manifest.rename()
        self._at("manifest renamed")
        sync(self.directory)
        self._at("directory synced")
        self._point("latest", checkpoint)
        if best:
            self._point("best", checkpoint)
        self.prune(checkpoint, {part.file for part in replaced})
        return checkpoint

    def _point(self, name: str, checkpoint: Checkpoint) -> None:
        """Let the pointer `latest.json` or `best.json` name the checkpoint."""
        content = {
            "format": manifests.MANIFEST_FORMAT,
            "step": checkpoint.step,
            "manifest": checkpoint.manifest.name,
            "metric": checkpoint.metric,
        }
        with NewFile(self.directory / f"{name}.json", self.root) as pointer:
            pointer.write(json.dumps(content).encode() + b"\n")
            pointer.sync()
            self._at(f"{name} synced")
            with self.only_writer():
                pointer.rename()
            self._at(f"{name} renamed")
        sync(self.directory)

    def prune(self, newest: Checkpoint, replaced: Collection[str] = ()) -> None:
        """Remove the data files that `newest` has replaced, by name, and checkpoints that are to be kept no longer."""
        # A checkpoint whose data is damaged does not count as one of the newest that stay.
        for name in {*replaced} - {part.file for part in newest.data}:
            remove_beneath(self.directory / name, self.root)
        found: dict[int, Path] = {}
        data: dict[int, list[Path]] = {}
        for path in self.directory.iterdir():
            step = manifests.step_of_manifest(path.name)
            # Checkpoints of later steps are left alone: they are damaged ones that were passed over, or not this run's.
            if step is not None and step <= newest.step:
                found[step] = path
            elif (step := manifests.step_of_data(path.name)) is not None:
                data.setdefault(step, []).append(path)
        sound = []
        for step, path in sorted(found.items(), reverse=True):
            with contextlib.suppress(OSError, Damaged):
                checkpoint = manifests.read_manifest(path)
                data[step] = [self.directory / part.file for part in checkpoint.data]
                manifests.require_data(checkpoint)
                sound.append(step)
        keep = {*sound[: self._keep_last], manifests.pointed_step(self.directory / "best.json"), *self.held}
        for step in sorted(found.keys() - keep):
            if any(step % each == 0 for each in self._keep_every):
                continue
            with self.only_writer():
                remove_beneath(found[step], self.root)
                self._at("old manifest removed")
                for path in data.get(step, []):
                    remove_beneath(path, self.root)
                self._at("old data removed")


def _tried(work: Callable[[], Result], target: Path, needed: int) -> tuple[Result | None, Exception | None]:
    """What `work` returns, or the exception that it raises; an OSError as the message about writing `target`."""
    try:
        return work(), None
    except OSError as error:
        problem = refused(error, target, needed)
        problem.__cause__ = error
        return None, problem
    except Exception as error:
        return None, error

"""The files of a checkpoint, written in the sequence that keeps it whole or not there; and the removal of old ones."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, cast

import torch

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import NewFile, sync_directory
from ddp_core.checkpoint import manifest as manifests
from ddp_core.checkpoint.data_file import At, DataFile
from ddp_core.checkpoint.fence import Fence, Superseded
from ddp_core.checkpoint.manifest import Checkpoint, Damaged, DataPart


class CheckpointFiles:
    """Writes and removes the files of the checkpoints in `directory`; the arguments are those of a `Checkpointer`."""

    def __init__(
        self,
        directory: Path,
        keep_last: int,
        keep_every: int | None,
        fence: Fence | Callable[[], object] | None,
        at: At,
    ) -> None:
        self.directory = directory
        self._keep_last, self._keep_every = keep_last, keep_every
        self._fence, self._at = fence, at

    def current(self) -> AbstractContextManager[None]:
        """A block during which no other process may write; raises Superseded where this process may not."""
        if isinstance(self._fence, Fence):
            return self._fence.holding()
        if self._fence is not None and self._fence() is False:
            raise Superseded(
                f"this process may no longer write to {self.directory}; it ends now and has left the files there as "
                "they were"
            )
        return contextlib.nullcontext()

    def free_name(self, step: int, part: tuple[int, int] | None) -> Path:
        """An unused name for a data file of `step`: an earlier file stays whole until the new manifest is there.

        `part`: which rank of how many, where each writes a file.
        """
        version = 1
        while (target := self.directory / manifests.data_name(step, version, part)).exists():
            version += 1
        return target

    @contextlib.contextmanager
    def data(self, target: Path, state: Any) -> Iterator[DataPart]:
        """Write a data file, which nothing commits yet; inside, it has its name, is on the disk, and is locked."""
        with DataFile(target) as data:
            self._at("data opened")
            data.on_first_write = lambda: self._at("data partly written")
            torch.save(state, cast("IO[bytes]", data))
            data.raise_write_error()
            self._at("data written")
            data.sync()
            self._at("data synced")
            with self.current():
                data.rename()
            # A power cut could otherwise keep the manifest's name alone: a checkpoint without data.
            sync_directory(self.directory)
            self._at("data renamed")
            yield DataPart(target.name, data.written, data.sha256)

    def commit_parts(self, parts: Sequence[DataPart], record: dict[str, Any], best: bool) -> Checkpoint:
        """Commit the data files that all ranks have written. Raises UserError (4) where this rank does not see one."""
        self._require_seen(parts)
        return self.commit(manifests.taken_together(parts), record, best, parts)

    def commit(self, data: DataPart, record: dict[str, Any], best: bool, parts: Sequence[DataPart] = ()) -> Checkpoint:
        """Write the manifest, whose renaming commits `data`, then the pointers; remove what is old."""
        checkpoint = Checkpoint(
            directory=self.directory,
            file=data.file,
            bytes=data.bytes,
            sha256=data.sha256,
            written_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            parts=tuple(parts),
            **record,
        )
        replaced: tuple[DataPart, ...] = ()
        with contextlib.suppress(OSError, Damaged):
            replaced = manifests.read_manifest(checkpoint.manifest).data
        with NewFile(checkpoint.manifest) as manifest:
            self._at("manifest opened")
            manifest.write(manifests.encode(checkpoint))
            self._at("manifest written")
            manifest.sync()
            self._at("manifest synced")
            with self.current():
                manifest.rename()
        self._at("manifest renamed")
        sync_directory(self.directory)
        self._at("directory synced")
        self._point("latest", checkpoint)
        if best:
            self._point("best", checkpoint)
        self._prune(checkpoint, {part.file for part in replaced})
        return checkpoint

    def remove_uncommitted(self, target: Path) -> None:
        """Remove a data file unless a manifest commits it.

        The disk is asked, not a variable: an interrupt can come right after the rename that commits.
        """
        with contextlib.suppress(OSError):
            if manifests.uncommitted(target):
                target.unlink()

    def _require_seen(self, parts: Sequence[DataPart]) -> None:
        """Raise UserError (4) where this process does not see the data files that others have written."""
        for rank, part in enumerate(parts):
            try:
                manifests.require_size(part, (self.directory / part.file).stat().st_size)
            except (OSError, Damaged):
                raise UserError(
                    f"rank {rank} has written {part.file}, but rank 0 does not see it in {self.directory}: give all "
                    "nodes one output directory that they share",
                    ExitCode.RESOURCES,
                ) from None

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
            with self.current():
                pointer.rename()
            self._at(f"{name} renamed")
        sync_directory(self.directory)

    def _prune(self, newest: Checkpoint, replaced: set[str]) -> None:
        for name in replaced - {part.file for part in newest.data}:
            (self.directory / name).unlink(missing_ok=True)
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
        keep = {*sound[: self._keep_last], manifests.pointed_step(self.directory / "best.json")}
        for step in sorted(found.keys() - keep):
            if self._keep_every is not None and step % self._keep_every == 0:
                continue
            with self.current():
                found[step].unlink(missing_ok=True)
                self._at("old manifest removed")
                for path in data.get(step, []):
                    path.unlink(missing_ok=True)
                self._at("old data removed")

"""Checkpoints on disk: found, verified before a byte is unpickled, and loaded; unfinished saves are removed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch

from ddp_core.base.beneath import open_file, remove_beneath
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import take_lock, target_of
from ddp_core.base.platforms import OPEN_FILES
from ddp_core.base.refusals import human_bytes
from ddp_core.base.shown import shown
from ddp_core.checkpoint.manifest import (
    Checkpoint,
    Damaged,
    manifest_at,
    pointed_step,
    read_manifest,
    require_data,
    require_size,
    step_of_data,
    step_of_manifest,
    uncommitted,
)
from ddp_core.checkpoint.parts import put_together, shapes_of, whole_tensors
from ddp_core.checkpoint.state import Shapes, oversized

_SHOWN = 4
_NAMED = re.compile(r"GLOBAL (\S+)")
"""Finds in torch's messages the function or class that a pickle would call."""


def _manifests(directory: Path) -> list[Path]:
    """The manifest files of `directory`, newest step first."""
    try:
        names = [path.name for path in directory.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"cannot read {directory}: {error.strerror}", ExitCode.RESOURCES) from error
    steps = sorted(((step, name) for name in names if (step := step_of_manifest(name)) is not None), reverse=True)
    return [directory / name for _, name in steps]


def _complete(path: Path) -> Checkpoint:
    """The checkpoint of a manifest, if its data files are there with the right sizes; raises Damaged."""
    try:
        checkpoint = read_manifest(path)
        require_data(checkpoint)
    except OSError as error:
        raise Damaged(f"{Path(error.filename or path).name}: {error.strerror}") from None
    return checkpoint


def find_checkpoints(directory: str | Path) -> list[Checkpoint]:
    """The committed checkpoints of `directory`, newest step first; checks manifests and file sizes, not digests."""
    found = []
    for path in _manifests(Path(directory)):
        with contextlib.suppress(Damaged):
            found.append(_complete(path))
    return found


def read_checkpoint(path: str | Path, *, sha256: str | None = None) -> Checkpoint:
    """The checkpoint of which `path` is the manifest or a data file; raises UserError (3) if it is missing or damaged.

    sha256: the digest that another process (rank 0) read; a checkpoint with another digest is an error.
    """
    path = Path(path)
    step = step_of_data(path.name)
    try:
        checkpoint = _complete(path if step is None else manifest_at(path.parent, step))
        if sha256 is not None and checkpoint.sha256 != sha256:
            raise Damaged(f"it is {checkpoint.sha256[:12]}… here and {sha256[:12]}… for the process that chose it")
    except Damaged as error:
        raise UserError(f"no usable checkpoint at {path}: {error}", ExitCode.NO_CHECKPOINT) from None
    return checkpoint


def best_checkpoint(directory: str | Path) -> Checkpoint | None:
    """The checkpoint that was saved last with `best=True`; None if there is none, or if it is damaged."""
    step = pointed_step(Path(directory) / "best.json")
    with contextlib.suppress(Damaged):
        return None if step is None else _complete(manifest_at(Path(directory), step))
    return None


@dataclass(frozen=True)
class Readers:
    """Several processes that load the same checkpoint at once, each of which verifies its share of the data files."""

    number: int
    """The number of this process, from 0."""
    count: int
    agree: Callable[[Exception | None], None]
    """A collective of all readers: is given what this one found wrong, and raises the first error of any."""


@contextlib.contextmanager
def _verified(checkpoint: Checkpoint, readers: Readers | None = None) -> Iterator[list[BufferedReader]]:
    """The open data files, all of which have the size and the SHA-256 of the manifest; raises Damaged or OSError."""
    number, count = (readers.number, readers.count) if readers is not None else (0, 1)
    error: Exception | None = None
    with contextlib.ExitStack() as stack:
        files: list[BufferedReader] = []
        try:
            for position, part in enumerate(checkpoint.data):
                data = stack.enter_context(open_file(checkpoint.directory / part.file))
                files.append(data)
                if position % count == number:
                    require_size(part, os.fstat(data.fileno()).st_size)
                    digest = hashlib.file_digest(data, "sha256").hexdigest()
                    if digest != part.sha256:
                        raise Damaged(f"{part.file} has SHA-256 {digest[:12]}…, its manifest says {part.sha256[:12]}…")
                    data.seek(0)
        except (Damaged, OSError) as problem:
            error = problem
        if readers is not None:
            readers.agree(error)
        if error is not None:
            raise error
        yield files


def verify(checkpoint: Checkpoint) -> None:
    """Raise UserError (3) unless each data file has the size and SHA-256 of the manifest; nothing is unpickled."""
    try:
        with _verified(checkpoint):
            pass
    except (Damaged, OSError) as error:
        raise _unusable(checkpoint, error) from None


def _unusable(checkpoint: Checkpoint, reason: object) -> UserError:
    return UserError(f"checkpoint {checkpoint.path} cannot be used: {reason}", ExitCode.NO_CHECKPOINT)


def newest_valid(directory: str | Path, on_event: Callable[[str], None] = lambda line: None) -> Checkpoint | None:
    """The newest checkpoint whose size and SHA-256 are right; `on_event` gets a warning line for each damaged one.

    Returns None if there is no manifest in `directory`. Raises UserError (3) if there are some and all are damaged.
    """
    directory = Path(directory)
    damages: list[str] = []
    for path in _manifests(directory):
        try:
            checkpoint = _complete(path)
            with _verified(checkpoint):
                pass
        except (Damaged, OSError) as error:
            damages.append(str(error))
            on_event(f"warning: checkpoint {path.with_suffix('').name} is damaged: {error}; trying the one before it")
        else:
            if damages:
                on_event(f"warning: falling back to the checkpoint of step {checkpoint.step}")
            return checkpoint
    if damages:
        raise UserError(
            f"no usable checkpoint in {directory}: {len(damages)} found, all damaged (the newest: {damages[0]}); "
            "restore one from a copy, or start afresh in another directory",
            ExitCode.NO_CHECKPOINT,
        )
    return None


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest


def difference(there: Shapes, here: Shapes) -> str | None:
    """What differs between the tensors of a checkpoint and those expected, in words; None if they are the same."""
    parts = []
    if missing := [name for name in here if name not in there]:
        parts.append(f"missing in it: {_some(missing)}")
    if unexpected := [name for name in there if name not in here]:
        parts.append(f"unexpected in it: {_some(unexpected)}")
    changed = [
        f"{name} is {there[name][0]} {there[name][1]} there, {here[name][0]} {here[name][1]} here"
        for name in here
        if name in there and list(there[name]) != list(here[name])
    ]
    if changed:
        parts.append(_some(changed))
    return shown("; ".join(parts)) or None


def load(
    checkpoint: Checkpoint,
    *,
    map_location: Any = "cpu",
    expect: Shapes | None = None,
    only: Sequence[str] | None = None,
    expect_metadata: Mapping[str, Any] | None = None,
    readers: Readers | None = None,
    in_parts: bool = False,
) -> Any:
    """The state of a checkpoint, read with `weights_only=True` from the open files whose digests were just computed.

    A checkpoint in parts is put together to the whole state, as one process would have saved it. With `in_parts` it is
    not: tensors that were saved in pieces are CutTensors, and nothing of a tensor is read from the files until it is
    copied. `readers`: the processes that load this checkpoint together, so that each file is verified by one of them.

    expect: what `describe` returns for the state that will be filled. only: compare just the parts under these
    top-level keys. expect_metadata: entries that the manifest's metadata must have.

    Raises UserError (3) where something differs, the digest is wrong, or the data holds more than tensors and plain
    values (code is refused, never run).
    """
    for key, value in (expect_metadata or {}).items():
        found = checkpoint.metadata.get(key)
        if found != value:
            raise _unusable(checkpoint, f"it was written with {key} {found!r}, this run has {value!r}")
    if expect is not None:
        there = checkpoint.shapes
        if only is not None:
            there = {name: shape for name, shape in there.items() if name.split(".", 1)[0] in only}
        if (differing := difference(there, expect)) is not None:
            raise _unusable(checkpoint, f"it is of another model: {differing}")
    try:
        with _verified(checkpoint, readers) as files:
            # Pieces are copied out of mapped files, so that they are never in memory beside the whole.
            is_mapped = in_parts or (bool(checkpoint.parts) and str(map_location) == "cpu")
            contents = [
                torch.load(
                    f"{OPEN_FILES}/{file.fileno()}" if is_mapped else file,
                    map_location=map_location,
                    weights_only=True,
                    mmap=is_mapped,
                )
                for file in files
            ]
            size = sum(part.bytes for part in checkpoint.data)
            if expect is None and (name := next(filter(None, (oversized(each, size) for each in contents)), None)):
                raise Damaged(f"{shown(name)} is larger than the files, as it was expanded")
            state = put_together(contents, checkpoint.shapes) if checkpoint.parts else contents[0]
            del contents
            state = state if in_parts else whole_tensors(state)
        differing = difference(shapes_of(state), checkpoint.shapes)
    except torch.OutOfMemoryError:
        raise
    except (Damaged, OSError) as error:
        raise _unusable(checkpoint, error) from None
    except Exception as error:
        reason = f"{type(error).__name__}: {_reason(error)}"
        raise _unusable(checkpoint, f"refused, it holds more than tensors and plain values ({reason})") from None
    if differing is not None:
        raise _unusable(checkpoint, f"its data is not what its manifest says: {differing}")
    return state


def _reason(error: Exception) -> str:
    """Why torch did not load the data, without its advice to use weights_only=False, which would run code."""
    if named := _NAMED.search(str(error)):
        return f"it names {named[1]}"
    lines = (line.strip() for line in str(error).splitlines() if "weights_only" not in line)
    return next((line[:200] for line in lines if line), "")


def sweep(
    directory: str | Path, on_event: Callable[[str], None] = lambda line: None, root: Path | None = None
) -> list[Path]:
    """Remove what dead writers left, temporary files and data files that no manifest commits; return their paths.

    Only files with names that this package gives are removed, and none whose flock a live writer holds.
    `root`: the run directory, where it is one: no link beneath it is followed.
    """
    removed = []
    directory = Path(directory)
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        if not _is_leftover(path):
            continue
        try:
            with open_file(path) as leftover:
                # Checked again under the lock: a live writer may have committed the file in between.
                if take_lock(leftover.fileno()) and _is_leftover(path):
                    remove_beneath(path, root)
                    removed.append(path)
                    on_event(
                        f"swept {path.name}, {human_bytes(os.fstat(leftover.fileno()).st_size)} of an unfinished save"
                    )
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                on_event(f"warning: cannot sweep {path}: {error.strerror}")
    return removed


def _is_leftover(path: Path) -> bool:
    """Whether `path` is a temporary file of this package, or a data file that no manifest commits."""
    target = target_of(path.name)
    if target is None:
        return uncommitted(path)
    pointers = ("latest.json", "best.json", "fence.json")
    return target in pointers or step_of_data(target) is not None or step_of_manifest(target) is not None

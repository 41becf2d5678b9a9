"""The manifest: a JSON file that says what a checkpoint is, with a digest of the data and a digest of itself."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from ddp_core.base.documents import BadDocument, Count, read_document, require_kind
from ddp_core.checkpoint.state import Shapes

MANIFEST_FORMAT = "ddp-checkpoint/1"

_DATA = re.compile(r"step-(\d{9,})(?:-\d+)?(\.part-\d+-of-\d+)?\.pt")
_MANIFEST = re.compile(r"step-(\d{9,})\.json")


class Damaged(Exception):
    """A file of a checkpoint is not what was written; the message says what is different."""


def manifest_at(directory: Path, step: int) -> Path:
    """The manifest of the checkpoint of this step, e.g. "step-000000120.json"."""
    return directory / f"step-{step:09d}.json"


def data_name(step: int, version: int, part: tuple[int, int] | None) -> str:
    """The name of a data file, e.g. "step-000000120.pt".

    `version` counts the saves of one step from 1. `part`: (rank, number of ranks), where several ranks write one each.
    """
    version_suffix = f"-{version}" if version > 1 else ""
    part_suffix = f".part-{part[0] + 1}-of-{part[1]}" if part is not None else ""
    return f"step-{step:09d}{version_suffix}{part_suffix}.pt"


def step_of_data(name: str) -> int | None:
    """The step in the name of a data file, None for any other name."""
    match = _DATA.fullmatch(name)
    return int(match[1]) if match else None


def is_part(path: str | Path) -> bool:
    """Whether `path` is named as one of several data files of a checkpoint, which only `load` puts together."""
    match = _DATA.fullmatch(Path(path).name)
    return match is not None and match[2] is not None


def step_of_manifest(name: str) -> int | None:
    """The step in the name of a manifest, None for any other name."""
    match = _MANIFEST.fullmatch(name)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class DataPart:
    """A data file: its name, its size, and its digest in hexadecimal."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Checkpoint:
    """One committed checkpoint, as its manifest describes it; its data has not been read."""

    directory: Path
    step: int
    epoch: int
    file: str
    """The data file; of several, the first rank's."""
    bytes: int
    """The size of all data files together."""
    sha256: str
    """The digest of the data file; of several, that of their hexadecimal digests, one after the other."""
    shapes: Shapes
    metadata: dict[str, Any]
    metric: float | None
    written_at: str
    parts: tuple[DataPart, ...] = ()
    """All data files, by rank, where several ranks have written one each."""

    @property
    def data(self) -> tuple[DataPart, ...]:
        """All data files."""
        return self.parts or (DataPart(self.file, self.bytes, self.sha256),)

    @property
    def path(self) -> Path:
        """The data file, or the first one."""
        return self.directory / self.file

    @property
    def manifest(self) -> Path:
        """The manifest file."""
        return manifest_at(self.directory, self.step)

    @property
    def file_names(self) -> tuple[str, ...]:
        """The names of all its files, the manifest last: a checkpoint is there once that is."""
        return (*(part.file for part in self.data), self.manifest.name)


class _Part(TypedDict):
    file: str
    bytes: Count
    sha256: str


class _Manifest(_Part):
    """The fields of a manifest, beside its format and its seal."""

    step: Count
    epoch: Count
    shapes: dict[str, Annotated[list[str | list[Count]], Field(min_length=2, max_length=2)]]
    metadata: dict[str, Any]
    metric: float | None
    written_at: str
    parts: NotRequired[list[_Part]]


class _Pointer(TypedDict):
    step: Count


def taken_together(parts: Sequence[DataPart]) -> DataPart:
    """All data files as the manifest names them together: the first one's name, their size, a digest of digests."""
    digest = hashlib.sha256("".join(part.sha256 for part in parts).encode()).hexdigest()
    return DataPart(parts[0].file, sum(part.bytes for part in parts), digest)


def _canonical(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def encode(checkpoint: Checkpoint) -> bytes:
    """The manifest's bytes: one JSON object, sealed with the digest of all its other fields."""
    content = {"format": MANIFEST_FORMAT, **asdict(checkpoint)}
    del content["directory"]
    if not checkpoint.parts:
        del content["parts"]
    seal = hashlib.sha256(_canonical(content)).hexdigest()
    # One field per line: indented JSON would spread the shapes over a thousand lines.
    lines = [
        f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in {**content, "seal": seal}.items()
    ]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def read_manifest(path: Path) -> Checkpoint:
    """The checkpoint that the manifest at `path` commits; raises Damaged, or OSError where it cannot be read."""
    try:
        content: dict[str, Any] = read_document(path, dict[str, Any], MANIFEST_FORMAT)
        if content.pop("seal", None) != hashlib.sha256(_canonical(content)).hexdigest():
            raise Damaged(f"{path.name} was changed after it was written (its seal does not fit)")
        del content["format"]
        require_kind(content, _Manifest)
        parts = tuple(DataPart(**part) for part in content.pop("parts", ()))
        checkpoint = Checkpoint(directory=path.parent, parts=parts, **content)
    except BadDocument as error:
        raise Damaged(f"{path.name} cannot be read: {error}") from None
    except TypeError as error:
        raise Damaged(f"{path.name} has other fields than {MANIFEST_FORMAT} ({error})") from None
    names = [part.file for part in checkpoint.data]
    if {checkpoint.step} != {step_of_manifest(path.name), *map(step_of_data, names)}:
        raise Damaged(
            f"{path.name} should describe the step in its own name, but says step {checkpoint.step} and names the data "
            f"file {' and '.join(names)}"
        )
    if parts and taken_together(parts) != DataPart(checkpoint.file, checkpoint.bytes, checkpoint.sha256):
        raise Damaged(f"{path.name} lists parts that do not fit the rest of it")
    return checkpoint


def require_data(checkpoint: Checkpoint) -> None:
    """Raise Damaged unless each data file has the size that the manifest says, or OSError where one is not there."""
    for part in checkpoint.data:
        require_size(part, (checkpoint.directory / part.file).stat().st_size)


def require_size(part: DataPart, size: int) -> None:
    """Raise Damaged unless `size`, in bytes, is what the manifest says of the data file."""
    if size != part.bytes:
        raise Damaged(f"{part.file} has {size} bytes, its manifest says {part.bytes}")


def pointed_step(path: Path) -> int | None:
    """The step that `latest.json` or `best.json` points to; None if there is no such file, or an unreadable one."""
    try:
        return read_document(path, _Pointer)["step"]
    except (OSError, BadDocument):
        return None


def uncommitted(path: Path) -> bool:
    """Whether `path` is a data file that no manifest commits.

    The data of a damaged manifest does not count as uncommitted: a user may still want it.
    """
    step = step_of_data(path.name)
    if step is None:
        return False
    try:
        committed = read_manifest(manifest_at(path.parent, step))
        return all(part.file != path.name for part in committed.data)
    except FileNotFoundError:
        return True
    except (Damaged, OSError):
        return False

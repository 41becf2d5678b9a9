"""The manifest: a JSON file that says what a checkpoint is, with a digest of the data and a digest of itself."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddp_core.checkpoint.state import Shapes

FORMAT = "ddp-checkpoint/1"

_DATA = re.compile(r"step-(\d{9,})(?:-\d+)?\.pt")
_MANIFEST = re.compile(r"step-(\d{9,})\.json")


class Damaged(Exception):
    """A file of a checkpoint is not what was written; the message says what is different."""


def stem(step: int) -> str:
    """The common name of a checkpoint's files, e.g. "step-000000120"."""
    return f"step-{step:09d}"


def step_of_data(name: str) -> int | None:
    """The step in the name of a data file, None for any other name."""
    match = _DATA.fullmatch(name)
    return int(match[1]) if match else None


def step_of_manifest(name: str) -> int | None:
    """The step in the name of a manifest, None for any other name."""
    match = _MANIFEST.fullmatch(name)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class Checkpoint:
    """One committed checkpoint, as its manifest describes it; its data has not been read."""

    directory: Path
    step: int
    epoch: int
    file: str
    bytes: int
    sha256: str
    shapes: Shapes
    metadata: dict[str, Any]
    metric: float | None
    written_at: str

    @property
    def path(self) -> Path:
        """The data file."""
        return self.directory / self.file

    @property
    def manifest(self) -> Path:
        """The manifest file."""
        return self.directory / f"{stem(self.step)}.json"


def _canonical(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def encode(checkpoint: Checkpoint) -> bytes:
    """The manifest's bytes: one JSON object, sealed with the digest of all its other fields."""
    content = {"format": FORMAT, **asdict(checkpoint)}
    del content["directory"]
    seal = hashlib.sha256(_canonical(content)).hexdigest()
    # One field per line: indented JSON would spread the shapes over a thousand lines.
    lines = [
        f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in {**content, "seal": seal}.items()
    ]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def read_manifest(path: Path) -> Checkpoint:
    """The checkpoint that the manifest at `path` commits; raises Damaged, or OSError where it cannot be read."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise Damaged(f"{path.name} is not JSON ({error})") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else None
        raise Damaged(f"{path.name} has format {found!r}, not {FORMAT!r}")
    seal = content.pop("seal", None)
    try:
        sealed = hashlib.sha256(_canonical(content)).hexdigest()
    except ValueError:
        sealed = None
    if seal != sealed or sealed is None:
        raise Damaged(f"{path.name} was changed after it was written (its seal does not fit)")
    del content["format"]
    try:
        checkpoint = Checkpoint(directory=path.parent, **content)
    except TypeError as error:
        raise Damaged(f"{path.name} has other fields than {FORMAT} ({error})") from None
    if checkpoint.step != step_of_manifest(path.name) or checkpoint.step != step_of_data(checkpoint.file):
        raise Damaged(
            f"{path.name} should describe the step in its own name, but says step {checkpoint.step} and names the data "
            f"file {checkpoint.file}"
        )
    return checkpoint


def require_data(checkpoint: Checkpoint) -> None:
    """Raise Damaged unless the data file has the size that the manifest says, or OSError where it is not there."""
    size = checkpoint.path.stat().st_size
    if size != checkpoint.bytes:
        raise Damaged(f"{checkpoint.file} has {size} bytes, its manifest says {checkpoint.bytes}")


def pointed_step(path: Path) -> int | None:
    """The step that `latest.json` or `best.json` points to; None if there is no such file, or an unreadable one."""
    try:
        return int(json.loads(path.read_bytes())["step"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def uncommitted(path: Path) -> bool:
    """Whether `path` is a data file that no manifest commits.

    The data of a damaged manifest does not count as uncommitted: a user may still want it.
    """
    step = step_of_data(path.name)
    if step is None:
        return False
    try:
        return read_manifest(path.with_name(f"{stem(step)}.json")).file != path.name
    except FileNotFoundError:
        return True
    except (Damaged, OSError):
        return False

"""`ddp bundle`: a finished run as one file, to hand it over.

A bundle (format `ddp-bundle/1`, which is the zip file's comment) is a zip file whose members are stored as they are,
without compression, by sorted names and with one fixed time: the same run gives the same bytes. MANIFEST has the
SHA-256 of each other member, as `sha256sum --check` reads it.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from zipfile import ZIP_STORED, ZipFile, ZipInfo

from ddp_core.base.digests import weights_digest
from ddp_core.base.errors import ExitCode, UserError, is_full, no_room
from ddp_core.base.files import NewFile
from ddp_core.experiment.source import read_source
from ddp_core.record.continuing import recorded_weights
from ddp_core.record.directory import RunDirectory
from ddp_core.record.environment import pins
from ddp_core.record.initial_weights import read_weights

FORMAT = "ddp-bundle/1"
MANIFEST = "MANIFEST"
PINS = "pins.txt"
INITIAL_WEIGHTS = "init_from"
"""The member with the weights that the run began with, where it has any; its suffix is that of their file."""
_ALWAYS = ("run.json", "metrics.jsonl", "log.txt", "model.safetensors")
_WHERE_PRESENT = ("model_ema.safetensors", "data.json")
_BEGINNING_OF_ZIP_TIME = (1980, 1, 1, 0, 0, 0)
_PLAIN_FILE = 0o100644 << 16

Content = Callable[[], AbstractContextManager[BinaryIO]]
"""Opens the content of a member."""


def bundle(path: Path, target: Path | None) -> int:
    """Write the finished run at `path` into the file `target`, and print its digest.

    Raises UserError for a run that is not finished or whose files have changed, for a target that exists or lies in the
    run's own directory, and (4) where it cannot be written.
    """
    record = RunDirectory(path).read()
    if record["status"] != "completed":
        raise UserError(f"{path} is {record['status']}, so it has no result to hand over; finish it: --resume {path}")
    target = target or Path(f"{record['experiment']['name']}-{path.resolve().name}.zip")
    if target.exists():
        raise UserError(f"{target} exists; name another file with -o FILE")
    if target.resolve().is_relative_to(path.resolve()):
        raise UserError(f"{target} lies in the run's own directory; name a file elsewhere with -o FILE")
    members = _members(path, record)
    try:
        with NewFile(target) as new:
            _write(new.temporary, members)
            with new.temporary.open("rb") as written:
                digest = hashlib.file_digest(written, "sha256").hexdigest()
            new.rename()
    except OSError as error:
        if is_full(error):
            raise no_room(target.parent, error) from None
        raise UserError(f"cannot write {target}: {error.strerror}", ExitCode.RESOURCES) from None
    print(f"{target}: {len(members) + 1} files, {target.stat().st_size:,} bytes, sha256 {digest}")
    return ExitCode.DONE


def _members(path: Path, record: dict[str, Any]) -> dict[str, Content]:
    """What goes into the bundle beside MANIFEST, by name."""
    files = {name: path / name for name in (*_ALWAYS, *_WHERE_PRESENT) if name in _ALWAYS or (path / name).exists()}
    folder, source = record["source"]["folder"], read_source(path, record["source"])
    files |= {f"{folder}/{place}": path / folder / place for place in source.texts}
    if (weights := recorded_weights(record)) is not None:
        files[_checked_name(Path(weights.file), weights.sha256)] = Path(weights.file)
    missing = [str(file) for file in files.values() if not file.is_file()]
    if missing:
        raise UserError(f"{missing[0]} is missing, so the run cannot be handed over whole")
    texts = {PINS: pins(record["environment"]), "README.txt": _readme(record, path.resolve().name, files)}
    return {name: _opens(file) for name, file in files.items()} | {name: _says(text) for name, text in texts.items()}


def _checked_name(file: Path, sha256: str) -> str:
    if not file.is_file() or weights_digest(read_weights(file)) != sha256:
        raise UserError(f"{file}, whose weights the run began with, is gone or has changed: restore it")
    return INITIAL_WEIGHTS + file.suffix


def _opens(file: Path) -> Content:
    return lambda: file.open("rb")


def _says(text: str) -> Content:
    return lambda: BytesIO(text.encode())


def _write(file: Path, members: dict[str, Content]) -> None:
    contents = members | {MANIFEST: _says("".join(_manifest(members)))}
    with ZipFile(file, "w", ZIP_STORED) as archive:
        archive.comment = FORMAT.encode()
        for name, content in sorted(contents.items()):
            info = ZipInfo(name, _BEGINNING_OF_ZIP_TIME)
            info.create_system, info.external_attr = 3, _PLAIN_FILE  # as on Linux, wherever it is written
            with content() as source, archive.open(info, "w", force_zip64=True) as member:
                shutil.copyfileobj(source, member, 1 << 20)


def _manifest(members: dict[str, Content]) -> Iterator[str]:
    for name, content in sorted(members.items()):
        digest = hashlib.sha256()
        with content() as source:
            while part := source.read(1 << 20):
                digest.update(part)
        yield f"{digest.hexdigest()}  {name}\n"


_DESCRIBED = {
    "run.json": "what was trained, where, on which code, data and packages, and how it ended",
    "source": "the code: the experiment's file and the modules that it imports",
    "model.safetensors": "the final weights; their digest is `weights_sha256` in run.json",
    "model_ema.safetensors": "the moving average of the weights",
    INITIAL_WEIGHTS: "the weights that the run began with",
    "metrics.jsonl": "losses and digests on the way",
    "log.txt": "what was said on the way",
    "data.json": "the digests of the parts of the data set",
    PINS: "every installed package, as `pip install -r` takes it",
    MANIFEST: "the SHA-256 of each file here",
}


def _readme(record: dict[str, Any], run: str, files: Iterable[str]) -> str:
    here = {PINS, MANIFEST, *files, *(PurePosixPath(name).parts[0] for name in files)}
    here |= {INITIAL_WEIGHTS} if any(name.startswith(INITIAL_WEIGHTS) for name in files) else set()
    rows = "\n".join(f"{name:22} {words}" for name, words in _DESCRIBED.items() if name in here)
    return f"""\
{record["experiment"]["name"]}: {record["question"]}
The finished training run {run}, as `ddp bundle` packs it: {record["result"]["steps"]} steps.

{rows}

Is it whole?  unzip it, and: sha256sum --check MANIFEST
Is it true?   ddp verify THIS-FILE.zip [--data-dir DIR]
              This runs the code in the bundle: it trains the run again and compares the bits.

The weights, in a model that the code in source/ builds:

    from safetensors.torch import load_model
    load_model(model, "model.safetensors")

This also serves a model whose layers share (tie) weights, which the file holds once. For any other model it is the same
as model.load_state_dict(safetensors.torch.load_file("model.safetensors")).
"""

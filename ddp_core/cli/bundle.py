"""`ddp bundle`: a finished run as one file, to hand it over."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Mapping
from io import BufferedReader, BytesIO
from pathlib import Path, PurePosixPath
from typing import Any
from zipfile import ZIP_STORED, ZipFile, ZipInfo

from ddp_core.base.beneath import open_file
from ddp_core.base.digests import weights_digest
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import NewFile, is_file, is_there, sha256_of, sync
from ddp_core.base.refusals import refused
from ddp_core.checkpoint import read_checkpoint
from ddp_core.checkpoint.manifest import manifest_at
from ddp_core.experiment.kept_source import read_source
from ddp_core.record.bundles import BUNDLE_FORMAT, MANIFEST, PINS
from ddp_core.record.directory import RunDirectory
from ddp_core.record.pins import pins
from ddp_core.record.recorded import require_source, what_broke_it
from ddp_core.record.weights import WEIGHTS, final_weights, read_weights

_INITIAL_WEIGHTS = "init_from"
"""The member with the weights that the run began with, where it has any; its suffix is that of their file."""
_BROKEN = "PROMISE_BROKEN.txt"
"""The member that says what the run's guard found, where it found something and the run went on."""
_ALWAYS = ("run.json", "metrics.jsonl", "log.txt", WEIGHTS)
_WHERE_PRESENT = ("model_ema.safetensors", "data.json")
_BEGINNING_OF_ZIP_TIME = (1980, 1, 1, 0, 0, 0)
_PLAIN_FILE = 0o100644 << 16

Content = Path | bytes
"""The content of a member: that of a file, or the bytes themselves."""


def make_bundle(path: Path, target: Path | None) -> int:
    """Write the finished run at `path` into the file `target`, and print its digest. Raises UserError."""
    record = RunDirectory(path).read()
    if record["status"] != "completed":
        raise UserError(f"{path} is {record['status']}, so it has no result to hand over; finish it: --resume {path}")
    require_source(path, record)
    if (fork := record.get("forked_from")) is not None:
        raise UserError(
            f"{path} is a fork of {fork['run']}, without which nobody can train it again, and a bundle holds one run: "
            "hand over both run directories"
        )
    target = target or Path(f"{record['experiment']['name']}-{path.resolve().name}.zip")
    if is_there(target):
        raise UserError(f"{target} exists; name another file with -o FILE")
    if target.resolve().is_relative_to(path.resolve()):
        raise UserError(f"{target} lies in the run's own directory; name a file elsewhere with -o FILE")
    members = _members(path, record)
    try:
        with NewFile(target) as new:
            _write(new.temporary, members)
            digest = sha256_of(new.temporary)
            sync(new.temporary)
            new.rename()
        sync(target.parent)
    except OSError as error:
        raise refused(error, target) from None
    print(f"{target}: {len(members) + 1} files, {target.stat().st_size:,} bytes, sha256 {digest}")
    if (what := what_broke_it(record)) is not None:
        print(f"note: {what}. The bundle says so in {_BROKEN}, and `ddp verify` will")
    return ExitCode.DONE


def _members(path: Path, record: Mapping[str, Any]) -> dict[str, Content]:
    """What goes into the bundle beside MANIFEST, by name."""
    files = {name: path / name for name in (*_ALWAYS, *_WHERE_PRESENT) if name in _ALWAYS or is_there(path / name)}
    folder, source = record["source"]["folder"], read_source(path, record["source"])
    files |= {f"{folder}/{place}": path / folder / place for place in source.texts}
    files |= _for_audit(path, record)
    initial = _initial_weights(record)
    missing = [str(file) for file in files.values() if not is_file(file)]
    if missing:
        raise UserError(f"{missing[0]} is missing, so the run cannot be handed over whole")
    if odd := [name for name in files if name != name.encode(errors="replace").decode()]:
        raise UserError(
            f"{odd[0]!r} cannot be the name of a file in a bundle, where names are UTF-8; rename it and train"
        )
    final_weights(path, record)
    texts = {PINS: pins(record["environment"]), "README.txt": _readme(record, path.resolve().name, [*files, *initial])}
    if (what := what_broke_it(record)) is not None:
        texts[_BROKEN] = f"{what}\nThe run went on all the same (--on-difference warn).\n"
    # A file's name may hold bytes that are no UTF-8; in a text they are written as they are.
    return files | initial | {name: text.encode(errors="surrogateescape") for name, text in texts.items()}


def _for_audit(path: Path, record: Mapping[str, Any]) -> dict[str, Path]:
    """The checkpoints with which the segments of an audit begin, by the name in the bundle."""
    steps = [state["step"] for state in (record.get("kept") or {"states": []})["states"]][:-1]
    kept = [read_checkpoint(manifest_at(path / "checkpoints", step)) for step in steps]
    return {f"checkpoints/{name}": each.directory / name for each in kept for name in each.file_names}


def _initial_weights(record: Mapping[str, Any]) -> dict[str, Content]:
    """The weights that the run began with, by the name in the bundle. Raises UserError where they have changed."""
    if (weights := record.get("init_from")) is None:
        return {}
    file = Path(weights["file"])
    if not is_file(file) or weights_digest(read_weights(file)) != weights["sha256"]:
        raise UserError(f"{file}, whose weights the run began with, is gone or has changed: restore it")
    return {_INITIAL_WEIGHTS + file.suffix: file}


def _open(content: Content) -> BufferedReader | BytesIO:
    return open_file(content) if isinstance(content, Path) else BytesIO(content)


def _write(file: Path, members: dict[str, Content]) -> None:
    manifest = ""
    for name, content in sorted(members.items()):
        with _open(content) as source:
            manifest += f"{hashlib.file_digest(source, 'sha256').hexdigest()}  {name}\n"
    contents = members | {MANIFEST: manifest.encode()}
    with ZipFile(file, "w", ZIP_STORED) as archive:
        archive.comment = BUNDLE_FORMAT.encode()
        for name, content in sorted(contents.items()):
            info = ZipInfo(name, _BEGINNING_OF_ZIP_TIME)
            info.create_system, info.external_attr = 3, _PLAIN_FILE  # as on Linux, wherever it is written
            with _open(content) as source, archive.open(info, "w", force_zip64=True) as member:
                shutil.copyfileobj(source, member, 1 << 20)


_DESCRIBED = {
    "run.json": "what was trained, where, on which code, data and packages, and how it ended",
    "source": "the code: the experiment's file and the modules that it imports",
    "model.safetensors": "the final weights; their digest is `weights_sha256` in run.json",
    "model_ema.safetensors": "the moving average of the weights",
    _INITIAL_WEIGHTS: "the weights that the run began with",
    "metrics.jsonl": "losses and digests on the way",
    "log.txt": "what was said on the way",
    "data.json": "the digests of the parts of the data set",
    "checkpoints": "the states with which the segments begin that an audit trains again",
    _BROKEN: "what the run's own checks found: why its weights are not promised again",
    PINS: "every installed package, as `pip install -r` takes it",
    MANIFEST: "the SHA-256 of each file here",
}


def _readme(record: Mapping[str, Any], run: str, files: Iterable[str]) -> str:
    end = ""
    here = {PINS, MANIFEST, *files, *(PurePosixPath(name).parts[0] for name in files)}
    here |= {_INITIAL_WEIGHTS} if any(name.startswith(_INITIAL_WEIGHTS) for name in files) else set()
    if (what := what_broke_it(record)) is not None:
        here.add(_BROKEN)
        end = f"\n\nBut: {what}"
    pieces = "\nIn pieces?    ddp audit THIS-FILE.zip [--data-dir DIR]" if record.get("kept") is not None else ""
    rows = "\n".join(f"{name:22} {words}" for name, words in _DESCRIBED.items() if name in here)
    return f"""\
{record["experiment"]["name"]}: {record["question"]}
The finished training run {run}, as `ddp bundle` packs it: {record["result"]["steps"]} steps.{end}

{rows}

Is it whole?  unzip it, and: sha256sum --check MANIFEST
Is it true?   ddp verify THIS-FILE.zip [--data-dir DIR]
              This runs the code in the bundle: it trains the run again and compares the bits. With the packages of
              the run, in an environment that uv makes: --rebuild{pieces}

The weights, in a model that the code in source/ builds:

    from safetensors.torch import load_model
    load_model(model, "model.safetensors")

This also serves a model whose layers share (tie) weights, which the file holds once. For any other model it is the same
as model.load_state_dict(safetensors.torch.load_file("model.safetensors")).
"""

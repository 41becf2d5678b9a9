"""The weights of a run for other programs: a folder with one file, whole or not there, that is never written over."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ddp_core.base.digests import weights_digest
from ddp_core.base.errors import UserError, first_line
from ddp_core.base.files import is_there, make_directory, sync
from ddp_core.base.refusals import refusal, refused
from ddp_core.record.places import Place
from ddp_core.record.trained import At, Choice, weights_at

FILES = {"safetensors": "model.safetensors", "torch": "model.pt"}
"""The file's name by its format, the word after `--to`."""


class Export(NamedTuple):
    """What was written."""

    file: Path
    digest: str
    notes: list[str]
    """What the user must know of it."""


def export(place: Place, to: str, target: Path | None, at: At = "final", weights: Choice = "auto") -> Export:
    """Write weights of a run into a new folder, in the format `to`.

    `target`: the folder, which must not exist; None: one here, named by the experiment, the run and the format. Raises
    UserError where the format cannot hold these weights, (3) where they are not those of the run, and (4) where nothing
    can be written.
    """
    found = weights_at(place, at)
    name = found.record["experiment"]["name"]
    target = target or Path(f"{name}-{place.name}-{to}")
    if is_there(target):
        raise UserError(f"{target} exists, and nothing is written over; name another folder with --out DIR")
    if target.resolve().is_relative_to(found.run.path.resolve()):
        raise UserError(f"{target} lies in the run's own directory; name a folder elsewhere with --out DIR")
    with found.experiment() as loaded:
        states = found.read()
        kind, why = states.choose(weights, found.place)
        state: dict[str, Tensor] = found.model(loaded, states.by_kind[kind], "cpu").state_dict()
    metadata = {
        "format": "pt",
        "digest": weights_digest(state),
        "experiment": name,
        "experiment_sha256": found.record["experiment_sha256"],
        "run": place.name,
        "step": str(found.step),
        "weights": kind,
    }
    _write(target, to, state, metadata)
    notes = [] if why is None else [f"{kind} weights: {why}; --weights chooses"]
    return Export(target / FILES[to], metadata["digest"], notes)


def _write(target: Path, to: str, state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write the folder under a name of its own, and rename it. Raises UserError, (4) where nothing can be written."""
    new = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    try:
        make_directory(target.absolute().parent)
        new.mkdir()
        file = new / FILES[to]
        save(file, to, state, metadata)
        file.chmod(new.stat().st_mode & 0o666)  # safetensors lets nobody else read what it writes
        sync(file)
        sync(new)
        if is_there(target):
            raise UserError(f"{target} was made meanwhile, and nothing is written over; export again")
        new.rename(target)
        sync(target.absolute().parent)
    except OSError as error:
        raise refused(error, target) from None
    finally:
        shutil.rmtree(new, ignore_errors=True)


def save(file: Path, to: str, state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write one file. Raises OSError, and UserError where the format cannot hold these weights."""
    try:
        if to == "torch":
            torch.save(dict(state), file)
        else:
            from safetensors.torch import save_file

            # Each name has a tensor of its own: the format refuses shared memory, and load_state_dict wants every name.
            own = {name: tensor.detach().contiguous().clone() for name, tensor in state.items()}
            save_file(own, file, dict(metadata))
    except OSError:
        raise
    except Exception as error:
        if (known := refusal(error)) is not None:
            raise known from error
        reason = first_line(error)
        raise UserError(
            f"--to {to} cannot hold these weights ({type(error).__name__}: {reason}); --to torch holds any"
        ) from error

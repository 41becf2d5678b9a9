"""Files of weights: how they are read, and whether those of a run are the ones of its record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_core.base.digests import weights_digest
from ddp_core.base.errors import ExitCode, UserError, first_line
from ddp_core.base.files import is_file, is_there
from ddp_core.base.shown import shown
from ddp_core.checkpoint import is_part, load, oversized, read_checkpoint

WEIGHTS, AVERAGED_WEIGHTS = "model.safetensors", "model_ema.safetensors"
_DIGESTS = {WEIGHTS: "weights_sha256", AVERAGED_WEIGHTS: "ema_sha256"}
"""The files of a run's final weights, and the fields of run.json with their digests."""
_NESTED = ("model", "state_dict")
"""The keys under which a checkpoint may keep the weights: `model` in this project and in torch's examples, `state_dict`
in Lightning."""


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of safetensors, of a state dict that torch.save wrote, or of a checkpoint, by name.

    Raises UserError where it cannot be read, or holds something else.
    """
    if is_there(path) and not is_file(path):
        raise UserError(f"weights file {path} cannot be read: it is no file")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        state: Any = (
            load(read_checkpoint(path)) if is_part(path) else torch.load(path, map_location="cpu", weights_only=True)
        )
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"weights file {path} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # a damaged file can raise anything
        reason = first_line(error).partition(". ")[0]
        raise UserError(
            f"{path} holds no weights ({type(error).__name__}: {reason}); "
            "a .safetensors file, or a state dict saved with torch.save, is needed"
        ) from None
    for key in _NESTED:
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping) or not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{path} is no state dict: a mapping of names to tensors was expected")
    if not is_part(path) and (name := oversized(state, path.stat().st_size)) is not None:
        raise UserError(f"{path} holds no weights: {shown(name)} is larger than the file, as it was expanded")
    return dict(state)


def exchanged_weights(directory: Path, record: Mapping[str, Any]) -> str | None:
    """The name of a file with other weights than those whose digest the record has; None where there is none.

    Raises UserError (2) for a file that is missing, or cannot be read.
    """
    return next((name for name, _, is_recorded in _states(directory, record) if not is_recorded), None)


def final_weights(directory: Path, record: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """The state dicts of the files with a run's final weights, by the file's name; tied weights under all their names.

    Raises UserError (3) where a file holds other weights than the run ended with, (2) where it cannot be read.
    """
    found = {}
    for name, state, is_recorded in _states(directory, record):
        if not is_recorded:
            raise _exchanged(directory / name)
        found[name] = state
    return found


def require_recorded_weights(directory: Path, record: Mapping[str, Any]) -> None:
    """Raises UserError (3) where a file holds other weights than the run ended with, (2) where it cannot be read."""
    if (name := exchanged_weights(directory, record)) is not None:
        raise _exchanged(directory / name)


def _exchanged(file: Path) -> UserError:
    return UserError(
        f"{file} holds other weights than the run ended with; restore it from a copy, or train again",
        ExitCode.NO_CHECKPOINT,
    )


def _states(directory: Path, record: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Tensor], bool]]:
    """The name and the state dict of each file whose digest is recorded, and whether it has this digest."""
    for name, field in _DIGESTS.items():
        if (digest := record.get(field)) is not None:
            state = _whole_state(directory / name)
            yield name, state, weights_digest(state) == digest


def _whole_state(file: Path) -> dict[str, Tensor]:
    """The state dict in the file; safetensors has written tied weights once, and noted their other names."""
    from safetensors import SafetensorError, safe_open

    state = read_weights(file)
    try:
        with safe_open(file, "pt") as content:
            names: dict[str, str] = content.metadata() or {}
    except (OSError, SafetensorError):  # exchanged since it was read
        names = {}
    return state | {name: state[kept] for name, kept in names.items() if kept in state and name not in state}

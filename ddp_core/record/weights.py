"""Files of weights: how they are read, whether those of a run are as recorded, and how a run starts from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddp_core.base.digests import weights_digest
from ddp_core.base.errors import ExitCode, UserError, first_line
from ddp_core.base.files import is_file, is_there
from ddp_core.base.shown import shown
from ddp_core.base.torch_internals import plain_name
from ddp_core.checkpoint import difference, is_part, load, newest_valid, oversized, read_checkpoint
from ddp_core.record.directory import RunDirectory
from ddp_core.record.run_json import RecordedWeights

WEIGHTS, AVERAGED_WEIGHTS = "model.safetensors", "model_ema.safetensors"
_DIGESTS = {WEIGHTS: "weights_sha256", AVERAGED_WEIGHTS: "ema_sha256"}
"""The files of a run's final weights, and the fields of run.json with their digests."""
_NESTED = ("model", "state_dict")
"""The keys under which a checkpoint may keep the weights: `model` in this project and in torch's examples, `state_dict`
in Lightning."""
_WRAPPED = "module."
"""How names begin where DistributedDataParallel's state dict was saved instead of the model's."""


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of safetensors, of a state dict that torch.save wrote, or of a checkpoint."""
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
    """The name of a file with other weights than those whose digest the record has; None where there is none."""
    return next((name for name, _, is_recorded in _states(directory, record) if not is_recorded), None)


def final_weights(directory: Path, record: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """The state dicts of the files with a run's final weights, by the file's name; tied weights under all their names.

    Raises UserError (3) where a file holds other weights than the run ended with.
    """
    found = {}
    for name, state, is_recorded in _states(directory, record):
        if not is_recorded:
            raise UserError(
                f"{directory / name} holds other weights than the run ended with; restore it from a copy, or train "
                "again",
                ExitCode.NO_CHECKPOINT,
            )
        found[name] = state
    return found


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


def find_weights(given: str) -> RecordedWeights:
    """The weights to start from, of a file or of a run: its final or newest ones.

    Raises UserError where there are no weights, or the file holds more than tensors; and (3) where those of a finished
    run are not the ones that it ended with.
    """
    path = Path(given)
    if path.is_dir():
        run, final = RunDirectory(path), path / WEIGHTS
        record = run.read()
        is_finished = record["status"] == "completed"
        if is_finished and is_there(final):
            final_weights(path, record)
            path = final
        elif (newest := newest_valid(run.checkpoints)) is None:
            raise UserError(f"--init-from {path}: the run has no checkpoint yet", ExitCode.NO_CHECKPOINT)
        elif is_finished and newest.step != record["result"]["steps"]:
            raise UserError(f"--init-from {path}: {WEIGHTS} is gone, whose weights it means", ExitCode.NO_CHECKPOINT)
        else:
            path = newest.path
    return {"given": given, "file": str(path.resolve()), "sha256": weights_digest(read_weights(path))}


def put_weights(model: nn.Module, weights: RecordedWeights) -> None:
    """Load the weights into the model. Raises UserError (3) where they have changed, and (2) where they do not fit."""
    found = read_weights(Path(weights["file"]))
    if weights_digest(found) != weights["sha256"]:
        raise UserError(
            f"--init-from {weights['given']}: {weights['file']} has changed since the run began; "
            "restore it, or start anew with --resume never",
            ExitCode.NO_CHECKPOINT,
        )
    fill(model, found, f"--init-from {weights['given']}")


def fill(model: nn.Module, found: Mapping[str, Tensor], whose: str) -> None:
    """Load a state dict into the model: also that of a wrapped or compiled model, or one without second names.

    A tensor that a model has under several names (tied weights) may be there once.

    Raises UserError where the names or shapes are those of another model; its message begins with `whose`.
    """
    own = model.state_dict()
    if all(name.startswith(_WRAPPED) for name in found) and not any(name.startswith(_WRAPPED) for name in own):
        found = {name.removeprefix(_WRAPPED): value for name, value in found.items()}
    # Either of the two may be of a compiled model.
    ours = {plain_name(name): name for name in own}
    found = {ours.get(plain_name(name), name): value for name, value in found.items()}
    # safetensors keeps tied weights once, under one of their names.
    for name, tensor in own.items():
        twins = (twin for twin in found.keys() & own.keys() if own[twin].is_set_to(tensor))
        if name not in found and (twin := next(twins, None)) is not None:
            found[name] = found[twin]
    # Another dtype is converted; only names and shapes must fit.
    there = {name: [str(own.get(name, value).dtype), list(value.shape)] for name, value in found.items()}
    here = {name: [str(value.dtype), list(value.shape)] for name, value in own.items()}
    if (other := difference(there, here)) is not None:
        raise UserError(f"{whose}: these weights are of another model: {other}")
    model.load_state_dict(found)

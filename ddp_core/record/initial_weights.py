"""`--init-from`: the weights that a run starts from, found, checked and put into the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor, nn

from ddp_core.base.digests import weights_digest
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import is_there
from ddp_core.base.torch_internals import plain_name
from ddp_core.checkpoint import difference, newest_valid
from ddp_core.record.directory import RunDirectory
from ddp_core.record.weights import WEIGHTS, read_weights, require_recorded_weights

_WRAPPED = "module."
"""How names begin where DistributedDataParallel's state dict was saved instead of the model's."""


@dataclass(frozen=True)
class InitialWeights:
    """Where the initial weights come from, as run.json records it."""

    given: str
    """The words after `--init-from`."""
    file: str
    """The file that these words mean, as an absolute path."""
    sha256: str
    """The digest of the weights, made as `weights_sha256` is."""

    def to_json(self) -> dict[str, str]:
        """The `init_from` of run.json."""
        return asdict(self)


def find_weights(given: str) -> InitialWeights:
    """The weights of a file, or of a run: its final or newest ones.

    Raises UserError where there are no weights, or the file holds more than tensors; and (3) where those of a finished
    run are not the ones that it ended with.
    """
    path = Path(given)
    if path.is_dir():
        run, final = RunDirectory(path), path / WEIGHTS
        record = run.read()
        is_finished = record["status"] == "completed"
        if is_finished and is_there(final):
            require_recorded_weights(path, record)
            path = final
        elif (newest := newest_valid(run.checkpoints)) is None:
            raise UserError(f"--init-from {path}: the run has no checkpoint yet", ExitCode.NO_CHECKPOINT)
        elif is_finished and newest.step != record["result"]["steps"]:
            raise UserError(f"--init-from {path}: {WEIGHTS} is gone, whose weights it means", ExitCode.NO_CHECKPOINT)
        else:
            path = newest.path
    return InitialWeights(given, str(path.resolve()), weights_digest(read_weights(path)))


def put_weights(model: nn.Module, weights: InitialWeights) -> None:
    """Load the weights into the model. Raises UserError (3) where they have changed, and (2) where they do not fit."""
    found = read_weights(Path(weights.file))
    if weights_digest(found) != weights.sha256:
        raise UserError(
            f"--init-from {weights.given}: {weights.file} has changed since the run began; "
            "restore it, or start anew with --resume never",
            ExitCode.NO_CHECKPOINT,
        )
    fill(model, found, f"--init-from {weights.given}")


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

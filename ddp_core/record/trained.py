"""The weights of a run, a checkpoint of one, or a bundle; the run's own model with them in it; and a file of them.

Nothing is believed before it was hashed: a checkpoint is compared with its manifest and with the digest that the run
recorded at that step, final weights with the digest in run.json, and the code that builds the model with those of its
files.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ddp_core.base.digests import weights_digest
from ddp_core.base.errors import ExitCode, UserError, first_line
from ddp_core.base.files import is_there, make_directory, sync
from ddp_core.base.refusals import refusal, refused
from ddp_core.base.seeds import generators_kept
from ddp_core.base.torch_internals import uncompiled
from ddp_core.checkpoint import Checkpoint, best_checkpoint, find_checkpoints, load, newest_valid, read_checkpoint
from ddp_core.distributed.reports import tell_user
from ddp_core.experiment.file import LoadedExperiment, Served, load_experiment
from ddp_core.experiment.fresh_model import lazy_parts
from ddp_core.experiment.kept_source import kept_modules, read_source
from ddp_core.experiment.request import build_model
from ddp_core.observe.metrics import read_metrics
from ddp_core.record.bundles import Place, place_named
from ddp_core.record.directory import RunDirectory
from ddp_core.record.recorded import recorded_experiment, require_source
from ddp_core.record.run_json import RecordedRun
from ddp_core.record.weights import AVERAGED_WEIGHTS, WEIGHTS, fill, final_weights

At = int | Literal["final", "newest", "best"]
"""Which weights of a run: those of a step, the final ones, or those of its newest or best checkpoint."""
Kind = Literal["trained", "averaged"]
"""The weights that the optimizer has made, or their moving average."""
Choice = Literal["auto", "trained", "averaged"]
"""A kind; `auto`: where the run keeps an average, the kind that its last evaluation found better."""
_AVERAGE_OF = "module."
"""How the names of weights begin in the state of an average."""
FILES = {"safetensors": "model.safetensors", "torch": "model.pt"}
"""The file's name by its format, the word after `--to`."""


@dataclass(frozen=True)
class States:
    """The state dicts of one step on the CPU: `averaged` is there where the run keeps an average."""

    by_kind: Mapping[Kind, dict[str, Tensor]]
    evaluation: Mapping[str, Any]
    """The figures of the last evaluation until that step; empty where there was none."""

    def choose(self, choice: Choice, whose: str) -> tuple[Kind, str | None]:
        """The kind of weights that is meant, and why, where that had to be chosen. Raises UserError."""
        if choice == "averaged" and "averaged" not in self.by_kind:
            raise UserError(f"{whose}: there are no averaged weights; the experiment sets no ema_decay")
        if choice != "auto":
            return choice, None
        if "averaged" not in self.by_kind:
            return "trained", None
        for name, sign in (("test_accuracy", 1), ("test_loss", -1)):
            trained, averaged = (self.evaluation.get(f"{start}{name}") for start in ("", "ema_"))
            if trained is not None and averaged is not None:
                kind: Kind = "averaged" if sign * averaged >= sign * trained else "trained"
                return kind, f"{name} {averaged:.6g} of the averaged weights, {trained:.6g} of the trained ones"
        return "averaged", "no evaluation compares them with the trained ones"


@dataclass(frozen=True)
class TrainedWeights:
    """The weights after one step of a run; nothing of them has been read."""

    run: RunDirectory
    record: RecordedRun
    step: int
    checkpoint: Checkpoint | None
    """None: the files of the weights that the run ended with."""

    def read(self) -> States:
        """The state dicts. Raises UserError (3) where these are not the weights that the run has made."""
        if self.checkpoint is None:
            found = final_weights(self.run.path, self.record)
            kinds: dict[str, Kind] = {WEIGHTS: "trained", AVERAGED_WEIGHTS: "averaged"}
            return States({kinds[name]: state for name, state in found.items()}, self.record["result"])
        state = load(self.checkpoint)
        kept: dict[Kind, dict[str, Tensor]] = {"trained": dict(state["model"])}
        if state.get("average") is not None:
            kept["averaged"] = {
                name.removeprefix(_AVERAGE_OF): value
                for name, value in state["average"].items()
                if name.startswith(_AVERAGE_OF)
            }
        if (problem := self.refusal(weights_digest(kept["trained"]))) is not None:
            raise UserError(problem, ExitCode.NO_CHECKPOINT)
        return States(kept, state["position"]["evaluation"])

    def refusal(self, digest: str) -> str | None:
        """Why weights with this digest are not those that the run has made, in words; None where they may be."""
        told = {entry["step"]: entry.get("weights_sha256") for entry in read_metrics(self.run.metrics, "digest")}
        if told.get(self.step, digest) == digest:
            return None
        return (
            f"{self.run.path} has other weights than it recorded at step {self.step}; restore its checkpoints and "
            "metrics.jsonl from one copy, or take another step"
        )

    @contextmanager
    def experiment(self) -> Iterator[LoadedExperiment]:
        """The recorded experiment with the code that the run has kept; its modules are imported within the block."""
        require_source(self.run.path, self.record)
        source = self.record["source"]
        read_source(self.run.path, source)
        folder = self.run.path / source["folder"]
        with kept_modules(Served(str(folder), source["modules"])):
            loaded = load_experiment(str(folder / source["experiment"]))
            yield replace(loaded, experiment=recorded_experiment(self.record))

    def model(self, loaded: LoadedExperiment, weights: Mapping[str, Tensor], device: torch.device | str) -> nn.Module:
        """The experiment's model with these weights, not compiled, in eval mode, on `device`."""
        with generators_kept(torch.device(device)):
            model = build_model(loaded, device)
        if lazy_parts(model):
            # Lazy layers take their shapes from what they load.
            model.load_state_dict(weights, strict=False)
        fill(model, weights, str(self.run.path))
        return uncompiled(model).eval()

    @property
    def place(self) -> str:
        """What a message says of where these weights are."""
        return f"{self.run.path}, step {self.step}"


def weights_at(place: Place, at: At) -> TrainedWeights:
    """The weights of a run, or of the one checkpoint that was named. Raises UserError, (3) without a checkpoint."""
    run, record = place.run, place.run.read()
    if place.checkpoint is not None:
        checkpoint = read_checkpoint(place.checkpoint)
        if isinstance(at, int) and at != checkpoint.step:
            raise UserError(f"{place.checkpoint} is of step {checkpoint.step}; for step {at} give the run directory")
        return TrainedWeights(run, record, checkpoint.step, checkpoint)
    last = record["result"]["steps"] if record["status"] == "completed" else None
    if last is not None and at in ("final", last) and is_there(run.path / WEIGHTS):
        return TrainedWeights(run, record, last, None)
    if at == "final":
        if last is None:
            raise UserError(
                f"{run.path} is {record['status']}, so it has no trained model; finish it with --resume {run.path}, or "
                'take what it has: at="newest" (--at newest)'
            )
        at = last
    if at == "newest" and last is not None and not find_checkpoints(run.checkpoints):
        return TrainedWeights(run, record, last, None)
    found = kept_checkpoint(run, at)
    return TrainedWeights(run, record, found.step, found)


def kept_checkpoint(run: RunDirectory, at: int | Literal["newest", "best"]) -> Checkpoint:
    """The checkpoint of a step, or the newest or the best one. Raises UserError (3) where it is not there."""
    if at == "newest":
        found = newest_valid(run.checkpoints, tell_user)
    elif at == "best":
        found = best_checkpoint(run.checkpoints)
    else:
        found = next((each for each in find_checkpoints(run.checkpoints) if each.step == at), None)
    if found is None:
        there = ", ".join(str(each.step) for each in reversed(find_checkpoints(run.checkpoints))) or "none"
        which = at if isinstance(at, str) else f"of step {at}"
        raise UserError(
            f"{run.path} has no checkpoint {which}; of these steps it has one: {there} (--keep-every keeps more)",
            ExitCode.NO_CHECKPOINT,
        )
    return found


def load_model(
    run: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    *,
    at: At = "final",
    weights: Choice = "auto",
) -> nn.Module:
    """The trained model in eval mode on `device`: of a run directory, a checkpoint file in one, or a bundle.

    `at`: "final", the weights that the run ended with; a step, or "newest" or "best", for those of a checkpoint.
    `weights`: "trained", those of the optimizer; "averaged", their moving average (`ema_decay`); "auto", where the run
    keeps an average, those of the two that its last evaluation found better, which is said on standard error.

    The model is built by the code that the run has kept, whatever has become of the experiment's file since. That code
    is run, so read it first where the run is a stranger's. The dtypes are those of training (float32 but for what the
    model itself chose). A model that the experiment compiles comes as it is without torch.compile, and its weights have
    the names of the plain model. Random generators of this process stay as they are.

    Raises UserError (2) for a run that has not come to its end, unless `at` names a checkpoint, and where kept code was
    changed; and (3) where weights are not those that the run has made, or are not there.
    """
    with place_named(run) as place:
        found = weights_at(place, at)
        with found.experiment() as loaded:
            states = found.read()
            kind, why = states.choose(weights, found.place)
            if why is not None:
                tell_user(f'{kind} weights of step {found.step}: {why}; weights="trained" or "averaged" chooses')
            return found.model(loaded, states.by_kind[kind], device)


def export(place: Place, to: str, target: Path | None, at: At = "final", weights: Choice = "auto") -> Path:
    """Write weights of a run into a new folder `target`, or one named by the experiment, the run and the format `to`.

    Prints what was written, and returns the file. Raises UserError where the format cannot hold these weights, (3)
    where they are not those of the run, and (4) where nothing can be written.
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
    file = target / FILES[to]
    if why is not None:
        print(f"note: {kind} weights: {why}; --weights chooses")
    print(f"{file}: {file.stat().st_size:,} bytes")
    print(f"weights sha256 {metadata['digest']}")
    return file


def _write(target: Path, to: str, state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write the folder under a name of its own, and rename it."""
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

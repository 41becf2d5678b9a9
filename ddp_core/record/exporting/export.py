"""An export, from the weights of a run to a folder that is whole or not there."""

from __future__ import annotations

import secrets
import shutil
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ddp_core.base.digests import weights_digest
from ddp_core.base.errors import UserError
from ddp_core.base.files import is_there, make_directory, sync
from ddp_core.base.refusals import refused
from ddp_core.base.seeds import generators_kept
from ddp_core.base.user_code import user_code
from ddp_core.data.loader import Loader
from ddp_core.data.trees import Tree, call
from ddp_core.experiment.file import LoadedExperiment
from ddp_core.experiment.request import build_splits
from ddp_core.record.exporting.card import CARD, SUMS, card, sums
from ddp_core.record.exporting.formats import FORMATS, Subject, require_packages, write
from ddp_core.record.places import Place
from ddp_core.record.trained import At, Choice, weights_at

_SAMPLES = 2
"""Of which a graph is traced: a batch of one would be taken for a constant."""


class Export(NamedTuple):
    """What was written."""

    folder: Path
    files: int
    bytes: int
    digest: str
    lines: list[str]
    """What the user must know of it."""


def export(
    place: Place,
    to: str,
    target: Path | None,
    at: At = "final",
    weights: Choice = "auto",
    data_dir: Path | None = None,
    shard_bytes: int = 5 * 10**9,
) -> Export:
    """Write weights of a run into a new folder, in the format `to`.

    `target`: the folder, which must not exist; None: one here, named by the experiment, the run and the format.
    `data_dir`: where the data are whose samples a graph is traced with; None: as recorded. Raises UserError where the
    format cannot hold this model, (3) where the weights are not those of the run, and (4) where nothing can be written.
    """
    require_packages(to)
    found = weights_at(place, at)
    record, run, form = found.record, place.name, FORMATS[to]
    target = target or Path(f"{record['experiment']['name']}-{run}-{to}")
    if is_there(target):
        raise UserError(f"{target} exists, and nothing is written over; name another folder with --out DIR")
    if target.resolve().is_relative_to(found.run.path.resolve()):
        raise UserError(f"{target} lies in the run's own directory; name a folder elsewhere with --out DIR")
    with found.experiment() as loaded:
        states = found.read()
        kind, why = states.choose(weights, found.place)
        whole = found.model(loaded, states.by_kind[kind], "cpu")
        model = form.part(whole)
        folder = Path(data_dir or record["options"]["data_dir"])
        digest = weights_digest(model.state_dict())
        metadata = {
            "format": "pt",
            "digest": digest,
            "experiment": record["experiment"]["name"],
            "experiment_sha256": record["experiment_sha256"],
            "run": run,
            "step": str(found.step),
            "weights": kind,
        }
        subject = Subject(model, partial(_inputs, loaded, whole, folder), metadata, shard_bytes)
        lines = [] if why is None else [f"{kind} weights: {why}; --weights chooses"]
        with _new_folder(target) as new:
            notes = write(to, subject, new)
            if form.is_graph and (precision := loaded.experiment.precision) in ("bf16", "fp16"):
                notes.append(f"trained in {precision} by autocast, and the graph computes in the types of the weights")
            text = card(to, record, type(model).__name__, metadata, states.evaluation, notes)
            (new / CARD).write_text(text, encoding="utf-8")
            (new / SUMS).write_text(sums(new), encoding="utf-8")
    sizes = [path.stat().st_size for path in target.rglob("*") if path.is_file()]
    return Export(target, len(sizes), sum(sizes), digest, [*lines, *notes])


def _inputs(loaded: LoadedExperiment, model: torch.nn.Module, data_dir: Path) -> Tree:
    """The inputs of the first samples; a forward of them has filled what the model fills with its first one."""
    splits = build_splits(loaded, data_dir)
    samples = splits.test or splits.train
    loader = Loader(samples, collate=splits.collate)
    with generators_kept(), torch.no_grad(), user_code("your model"):
        inputs = loader.fetch(0, np.arange(_SAMPLES, dtype=np.int64) % len(samples))[0]
        call(model, inputs)
    return inputs


class _new_folder:
    """A folder under a name of its own beside `target`, which becomes `target` at the end of the block.

    It is removed where the block raises; an OSError becomes a UserError (4).
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._new = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")

    def __enter__(self) -> Path:
        try:
            make_directory(self._target.absolute().parent)
            self._new.mkdir()
        except OSError as error:
            raise refused(error, self._target) from None
        return self._new

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                mode = (self._new / CARD).stat().st_mode
                for path in filter(Path.is_file, self._new.rglob("*")):
                    path.chmod(mode)  # safetensors lets nobody else read what it writes
                    sync(path)
                sync(self._new)
                if is_there(self._target):
                    raise UserError(f"{self._target} was made meanwhile, and nothing is written over; export again")
                self._new.rename(self._target)
                sync(self._target.absolute().parent)
        except OSError as problem:
            raise refused(problem, self._target) from None
        finally:
            shutil.rmtree(self._new, ignore_errors=True)
        if isinstance(error, OSError):
            raise refused(error, self._target) from None

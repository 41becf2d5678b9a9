"""A run's rehearsal and its witness: which trainings are made for them, how they are compared, what is kept.

The rehearsal trains the experiment in miniature, two epochs of five steps: in one process without interruption, and on
the layout asked for, where it is killed in the second epoch and resumed. The state after each step must have the same
bits in both, on every rank. What came out is kept in the output folder, and not asked again for the same code,
settings, data, options and kind of layout.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ddp_core.base.beneath import read_file
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import make_directory, replace_file
from ddp_core.base.fingerprint import fingerprint
from ddp_core.config.cut import BatchCut
from ddp_core.config.experiment import Experiment
from ddp_core.config.layout import Layout
from ddp_core.data.data_digest import ADVICE, digest_items, unsteady_sample
from ddp_core.data.splits import Splits
from ddp_core.experiment.request import Request, build_splits
from ddp_core.experiment.source import collect
from ddp_core.numerics.limits import rules_of
from ddp_core.run.repeat import Miniature, Repeated, Training, elsewhere, other_bits
from ddp_core.trainers.job import Sums, Testimony
from ddp_core.trainers.noting import first_other, named

FOLDER = ".rehearsed"
"""In the output folder: a file for each rehearsal whose verdict is kept."""
_MOST_RANKS = 4
_NICEST = 19


def rehearse(request: Request, folder: Path) -> Testimony:
    """Rehearse the request, or find that this was done; `folder` gets files that are needed no longer."""
    began, place = time.monotonic(), folder / "rehearsal"
    layout = fitting(request.loaded.experiment, request.layout)
    if layout is None:
        return Testimony("not rehearsed: its layout does not fit this machine")
    try:
        splits = build_splits(request.loaded, Path(request.options.data_dir))
        key = _key(request, layout, splits)
        if key is None:
            return Testimony("not rehearsed: its data are others at each read")
        file = Path(request.options.output) / FOLDER / f"{key}.json"
        mini = Miniature.of(request, len(splits.train))
        resumed = ", killed and resumed," if mini.killed_after else ""
        there = "another" if layout.kind == "single" else layout.label
        same = f"one process and {there}{resumed} have the same bits"
        with contextlib.suppress(OSError, ValueError, KeyError):
            kept = json.loads(read_file(file))
            return Testimony(f"rehearsed on {kept['date']}: {same}")
        with alone(mini, place) as single:
            _, other = compared(mini, layout, single, place)
    except UserError as error:
        return Testimony(f"not rehearsed: {error}")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if other is not None:
        return Testimony(other, differs=True)
    with contextlib.suppress(OSError):
        make_directory(file.parent)
        date = datetime.now(UTC).date().isoformat()
        replace_file(file, json.dumps({"date": date, "experiment": request.loaded.experiment.name}))
    return Testimony(f"rehearsed in {time.monotonic() - began:.1f} s: {same}")


def alone(mini: Miniature, folder: Path) -> Training:
    """Begin to train the miniature in one process, without an interruption."""
    # Two trainings may begin within one second. A seed made of whole seconds would then be the same in both.
    place = folder / "single"
    return mini.training(Layout(device=mini.request.layout.device), place, {"clock_ahead": True}, workers=0)


def compared(mini: Miniature, layout: Layout, single: Training, folder: Path) -> tuple[Repeated, str | None]:
    """The miniature on the layout, killed and resumed; and what is other there than in a `single` process, in words."""
    if layout.device == "cuda":
        single.wait()  # two trainings would take each other's memory
    asked, reference = mini.killed_and_resumed(layout, folder / "asked"), single.wait()
    has_resumed = max(asked.sums[0], default=0) >= mini.killed_after > 0
    if not reference.code and asked.code == ExitCode.BAD_INPUT and has_resumed:
        return asked, f"a resume would not continue this run: {asked.said}"
    require_ended(reference, "on one process")
    require_ended(asked, f"on {layout.label}")
    if not reference.sums[0]:
        raise UserError("the miniature has noted no step")
    found = other_bits(reference, asked)
    if found is None:
        return asked, None
    if (random := _random_data(mini.request)) is not None:
        raise UserError(random)
    from ddp_core.run.explaining import explained

    return asked, explained(mini, layout, folder, reference, *found)


def require_ended(repeated: Repeated, where: str) -> None:
    """Raise UserError, with its exit code, for a miniature that has failed `where` it was trained."""
    if repeated.code:
        code = ExitCode(repeated.code) if repeated.code in set(ExitCode) else ExitCode.INTERNAL
        raise UserError(f"the miniature {where} ended with {repeated.code}: {repeated.said}", code)


def _random_data(request: Request) -> str | None:
    """A line that names a training sample which is another one when it is read twice; None where there is none."""
    if request.options.guard == "strict":  # which refuses such data
        return None
    with contextlib.suppress(UserError):
        number = unsteady_sample(build_splits(request.loaded, Path(request.options.data_dir)))
        if number is not None:
            what = f"training sample {number} is another one at each read, so no result can be repeated to the bit"
            return f"{what}; {ADVICE}"
    return None


def fitting(experiment: Experiment, wanted: Layout) -> Layout | None:
    """The layout with four ranks or replicas at most, all on this machine; None where none can be had."""
    if wanted.kind == "single":
        return wanted
    # As many ranks may share a GPU as the run itself has on one.
    places = max(torch.cuda.device_count(), wanted.nproc_per_node) if wanted.device == "cuda" else _MOST_RANKS
    for count in range(min(_MOST_RANKS, places, wanted.nnodes * wanted.nproc_per_node), 0, -1):
        dealt = wanted.dealt if count == wanted.shares else None
        layout = _unmeasured(wanted.model_copy(update={"nnodes": 1, "nproc_per_node": count, "dealt": dealt}))
        with contextlib.suppress(UserError):
            if layout.shares <= BatchCut.of(experiment, layout).micro_batches:
                return layout
    return None


def _unmeasured(layout: Layout) -> Layout:
    """The layout of a trial, in which no speeds are measured: equal shares in the place of `auto`."""
    return layout.model_copy(update={"dealt": None}) if layout.dealt == "auto" else layout


def _key(request: Request, layout: Layout, splits: Splits) -> str | None:
    """A digest of all that a verdict holds for; None where the data are random."""
    data = splits.digest or digest_items(replace(splits, files=())).sha256
    if data is None:
        return None
    options = request.options
    facts = {
        "experiment": request.loaded.experiment.digest(),
        "code": collect(request.loaded).files,
        "data": data,
        "layout": layout.model_dump(mode="json"),
        "options": [options.reduction, options.numerics, options.deterministic, options.cuda_graph, options.on_nan],
        "workers": min(options.workers, 1),
        "init_from": request.asked.init_from,
        "threads": os.environ.get("OMP_NUM_THREADS", "1"),  # in which ranks train; this process has one
        # What another process would compute on: a device is not asked for more than its kind here.
        "fingerprint": fingerprint(torch.device("cpu"), rules_of(options.numerics)),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def witnessed(request: Request, folder: Path, run: str, step: int, file: str) -> Testimony:
    """Train the steps after the checkpoint of `step` of a run again, and compare them with what it noted in `file`."""
    os.nice(_NICEST)  # the run trains meanwhile
    noted = {int(number): sums for number, sums in json.loads(read_file(Path(file))).items()}
    began, place = time.monotonic(), folder / f"witness-{step}"
    asked: dict[str, Any] = {"fork": run, "at": step, "init_from": None, "only_steps": max(noted)}

    def again(layout: Layout, name: str, **options: Any) -> Repeated:
        return Training(elsewhere(request, layout, place / name, asked, **options), place / name).wait()

    one = Layout(device=request.layout.device)
    there = _unmeasured(request.layout)
    try:
        repeated = again(one, "once", workers=0)
        seconds = time.monotonic() - began
        if repeated.code:
            why = f"one process that went on from step {step} ended with {repeated.code}: {repeated.said}"
            return Testimony(f"none: {why}", seconds=seconds)
        found = first_other(noted, repeated.sums[0], is_part=False)
        if found is None:
            said = f"steps after that of {step}, trained again on one process in {seconds:.1f} s: the same bits"
            return Testimony(said, seconds=seconds)
        number, names = found
        twice = again(one, "twice", workers=0)
        if not twice.code and other_bits(repeated, twice) is not None:
            if (random := _random_data(request)) is not None:
                return Testimony(f"none: {random}", seconds=seconds)
            why = (
                "and others each time: something draws from a source of true randomness or reads a clock, or this "
                "machine computes wrongly"
            )
        elif fitting(request.loaded.experiment, there) == there != one and _is_noted(noted, again(there, "there")):
            why = f"and {request.layout.label} has those of the run: the result depends on the layout"
        else:
            why = "the same each time: the run kept something that no checkpoint holds, or a machine computed wrongly"
    finally:
        shutil.rmtree(place, ignore_errors=True)
        Path(file).unlink(missing_ok=True)
    return Testimony(
        f"step {number}, trained again on one process from the checkpoint of step {step}, has other bits than in the "
        f"run ({named(names)}), {why}",
        differs=True,
        seconds=seconds,
    )


def _is_noted(noted: Mapping[int, Sums], repeated: Repeated) -> bool:
    return not repeated.code and first_other(noted, repeated.sums[0], is_part=False) is None

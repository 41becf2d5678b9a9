"""`ddp rehearse`: all that a long run will do, tried in short before it is submitted.

Everything is built, data twice; every layout that fits this machine trains two steps, evaluates and saves; a run is
killed and resumed on another layout; the weights are exported and loaded. Each of these is `ddp train` in processes
of its own, with `--only-steps`, in a folder that is removed afterwards.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ddp_core.base.cuda_driver import gpus_here
from ddp_core.base.digests import weights_digest
from ddp_core.base.errors import DIFFERENT, ExitCode, UserError
from ddp_core.cli.compare import aligned
from ddp_core.cli.preflight_figures import expectations, measured
from ddp_core.cli.preflight_layouts import Attempts, layouts_to_try
from ddp_core.cli.prepare import check_request, prepare
from ddp_core.cli.verify_layouts import shard_modes_for
from ddp_core.config.layout import Layout
from ddp_core.config.options import Asked, NodeRange
from ddp_core.data.data_digest import digest_items
from ddp_core.distributed.children import Children
from ddp_core.distributed.world import World
from ddp_core.experiment.request import BuiltExperiment, Request, build_parts, build_splits
from ddp_core.record.directory import find_runs
from ddp_core.record.exporting import export
from ddp_core.record.places import place_named
from ddp_core.record.reading import Run
from ddp_core.record.trained import load_model

STEPS = 2
EXPORTED = "weights exported and loaded"
_LIMIT = 300.0
"""Seconds that one training may take, beside the time for building its parts."""
_LEFT_OUT = {
    *("nnodes", "rdzv_endpoint", "rdzv_id", "resume", "accept_changed_code", "profile", "ledger", "faults", "log_to"),
    *("max_seconds", "stop_signal", "keep_last", "keep_every", "digest_every", "layout", "nproc_per_node", "shard"),
}
"""Options of the long run that its trials do without."""


@dataclass
class Trial:
    """One row of the table: what was tried, and how it went."""

    title: str
    seconds: float = 0.0
    error: UserError | None = None
    run: Run | None = None
    warnings: list[str] = field(default_factory=list)


def rehearse(asked: Asked, command: str) -> int:
    """Try everything, print a table and a verdict; returns 0 where the long run may be submitted.

    The exit code is otherwise that of the first failure, or 1 where layouts ended with different weights. Raises
    UserError where `ddp train` would before it starts.
    """
    if World.is_set():
        raise UserError("ddp rehearse starts processes itself: run it once, without torchrun or srun before it")
    began = time.monotonic()
    request = prepare(asked.model_copy(update={"resume": "never"}), command, can_hold=lambda _: True)
    check_request(request, only_look=True)
    parts = _built_twice(request)
    built_seconds = (time.monotonic() - began) / 2
    modes, refused = shard_modes_for(request.loaded.experiment, parts.optimizer)
    experiment = request.loaded.experiment
    steps = min(STEPS, experiment.total_steps(experiment.steps_per_epoch(len(parts.splits.train))))
    layout, attempts, notes = layouts_to_try(request, modes, _places(request.layout), steps)
    notes += [f"left out, {refused}"] if refused is not None and request.options.reduction == "exact" else []
    with Children("ddp-rehearsal-") as children:
        train = _Training(asked, children, _LIMIT + 10 * built_seconds)
        trials = [train(title, tries) for title, tries in attempts.items()]
        trials.append(_exported(trials, children.folder / "exported"))
        for line in aligned([_row(trial) for trial in trials]):
            print(line)
        told = expectations(request, parts, layout, trials[0].run)
        warnings = [*notes, *told.warnings, *_warnings(trials)]
        for name, text in {**told.lines, "warnings": str(len(warnings) or "none")}.items():
            print(f"{name:9}  {text}")
        for warning in warnings:
            print(f"  {warning}")
        return _verdict(trials, request, told.lack)


def _built_twice(request: Request) -> BuiltExperiment:
    """All parts. Raises UserError where the data are other ones when they are built again."""
    place = Path(request.options.data_dir)
    parts = build_parts(request.loaded, place)
    # Not the files: reading all of them may take longer than a rehearsal.
    seen = [digest_items(replace(each, files=())) for each in (parts.splits, build_splits(request.loaded, place))]
    if seen[0].sha256 != seen[1].sha256:
        raise UserError(
            "the data are other ones when they are built a second time, so ranks would train on unlike ones: draw "
            "random numbers from a generator that an option seeds"
        )
    return parts


def _places(layout: Layout) -> int:
    """How many ranks or replicas this machine has a device or a core for; two on any CPU."""
    return gpus_here() if layout.device == "cuda" else max(2, len(os.sched_getaffinity(0)))


class _Training:
    """Trains in short, as `asked`, in a child; each training may take `limit` seconds."""

    def __init__(self, asked: Asked, children: Children, limit: float) -> None:
        self._given = {name: getattr(asked, name) for name in asked.model_fields_set - _LEFT_OUT}
        self._children, self._limit = children, limit

    def __call__(self, title: str, attempts: Attempts) -> Trial:
        """What became of the attempts, of which all but the last are killed."""
        print(f"rehearsing {title} …", file=sys.stderr, flush=True)
        began, trial = time.monotonic(), Trial(title)
        output = self._children.folder / title
        try:
            for attempt in attempts:
                trial.warnings += self._attempt(attempt, output)
            found = list(find_runs(output))
            if len(found) != 1:
                raise UserError("the run that was killed was not resumed", ExitCode.NO_CHECKPOINT)
            trial.run = Run(found[0][0].path)
        except UserError as error:
            trial.error = error
        trial.seconds = time.monotonic() - began
        return trial

    def _attempt(self, attempt: Mapping[str, Any], output: Path) -> list[str]:
        """Train; returns the warnings that were printed. Raises UserError with the last line where that fails."""
        short = {"only_steps": STEPS, "checkpoint_every": 1, "asynchronous_save": False, "log_every": 1}
        alone = {"nnodes": NodeRange(1, 1), "max_restarts": 0, "output": str(output)}
        words = Asked(**{**self._given, **short, **alone, **attempt}).to_words()
        try:
            ended = self._children.ddp(["train", *words], self._limit)
        except subprocess.TimeoutExpired:
            raise UserError(
                f"it has not ended within {self._limit:.0f} s; docs/tutorials/my-training-hangs.md shows how to look",
                ExitCode.PEERS_LOST,
            ) from None
        if ended.code != 0 and "faults" not in attempt:
            raise ended.error()
        return [line.strip() for line in ended.errors.splitlines() if "warning: " in line]


def _exported(trials: Sequence[Trial], folder: Path) -> Trial:
    """The weights of the first run that has ended well, exported and loaded again into a model without them."""
    began, trial = time.monotonic(), Trial(EXPORTED)
    trial.run = next((each.run for each in trials if each.run is not None), None)
    try:
        if trial.run is None:
            raise UserError("there is no finished run")
        with place_named(trial.run) as place:
            export(place, "safetensors", folder, weights="trained")
        model, again = (load_model(trial.run, weights="trained") for _ in range(2))
        with torch.no_grad():
            for parameter in again.parameters():
                parameter.zero_()
        weights = {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}
        again.load_state_dict(weights)
        if weights_digest(again.state_dict()) != weights_digest(model.state_dict()):
            raise UserError("other weights were loaded than the run ended with", ExitCode.NO_CHECKPOINT)
    except UserError as error:
        trial.error = error
    except (RuntimeError, SafetensorError) as error:
        trial.error = UserError(f"the exported weights cannot be loaded: {error}", ExitCode.NO_CHECKPOINT)
    trial.seconds = time.monotonic() - began
    return trial


def _row(trial: Trial) -> dict[str, str]:
    digest = None if trial.run is None else trial.run.digest
    return {
        "tried": trial.title,
        "result": "done" if trial.error is None else f"failed ({int(trial.error.exit_code)})",
        "weights": "-" if digest is None else digest[:12],
        **measured(None if trial.title == EXPORTED else trial.run),
        "took": f"{trial.seconds:.1f} s",
    }


def _warnings(trials: Sequence[Trial]) -> list[str]:
    """What the runs have warned of, each once, and why a layout that was not asked for has failed."""
    said = [line.partition("warning: ")[2] for trial in trials for line in trial.warnings]
    refused = [f"{trial.title} has failed: {trial.error}" for trial in trials[1:-2] if trial.error is not None]
    return [*dict.fromkeys(said), *refused]


def _verdict(trials: Sequence[Trial], request: Request, lack: UserError | None) -> int:
    """Print the last line; returns the exit code.

    What decides is the layout asked for, the killed run and the loaded weights; another layout may be refused.
    """
    for trial in (trials[0], *trials[-2:]):
        if trial.error is not None:
            print(f"NOT ready: {trial.title}: {trial.error}")
            return trial.error.exit_code
    digests = {trial.run.digest for trial in trials if trial.run is not None}
    exact = request.options.reduction == "exact"
    if exact and len(digests) > 1:
        print(f"NOT ready: {len(digests)} different digests, and the exact reduction promises one")
        return DIFFERENT
    if lack is not None:
        print(f"NOT ready: {lack}")
        return lack.exit_code
    done = len([trial for trial in trials if trial.error is None])
    print(f"ready: {done} of {len(trials)} done{', one digest' if exact else ''}; the long run may be submitted")
    return ExitCode.DONE

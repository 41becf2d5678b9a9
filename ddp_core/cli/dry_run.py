"""What `ddp train` would do, found out as the run itself would, but without a start and without a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ddp_core.base.errors import ExitCode
from ddp_core.checkpoint import newest_valid
from ddp_core.cli.doctor import in_units
from ddp_core.cli.prepare import check_request
from ddp_core.config.cut import BatchCut
from ddp_core.config.experiment import Component, Experiment, Optimizer, Schedule
from ddp_core.config.records import Frozen
from ddp_core.distributed.world import World
from ddp_core.experiment.built import BuiltExperiment
from ddp_core.experiment.request import Request, build_parts
from ddp_core.record.continuing import find_resumable
from ddp_core.record.directory import RunDirectory
from ddp_core.record.forking import find_fork
from ddp_core.run.memory import require_room, standing_memory
from ddp_core.sharding import Sharding

_FILES = ("run.json", "metrics.jsonl", "log.txt", "source/", "heartbeats/", "checkpoints/", "model.safetensors")


def dry_run(request: Request) -> int:
    """Print what would run; returns 0. Raises UserError where the run would, before or while it builds its parts."""
    check_request(request, only_look=True)
    parts = build_parts(request.loaded, Path(request.options.data_dir))
    Sharding.of(request.layout).check_parts(parts.model, parts.optimizer)
    require_room(parts.model, request.loaded.experiment, request.layout, torch.device(request.layout.device))
    if World.from_environment().is_first:
        lines = {
            "experiment": _experiment(request),
            "layout": _layout(request),
            "batch": BatchCut.of(request.loaded.experiment, request.layout).describe(),
            "steps": _steps(request.loaded.experiment, len(parts.splits.train)),
            "data": _data(request, parts),
            "model": _model(request.loaded.experiment, parts),
            "memory": memory_of(request, parts),
            "optimizer": _rule(request.loaded.experiment.optimizer),
            "schedule": _rule(request.loaded.experiment.schedule),
            "starts": _start(request, len(parts.splits.train)),
            "files": _files(request),
            "checkpoints": _checkpoints(request),
        }
        for name, text in lines.items():
            print(f"{name:11}  {text}")
        print("nothing was started or written; without --dry-run this runs")
    return ExitCode.DONE


def _experiment(request: Request) -> str:
    loaded = request.loaded
    return f"{loaded.experiment.name} ({loaded.path}): {loaded.question}"


def _layout(request: Request) -> str:
    layout, options = request.layout, request.options
    count = f"{layout.world_size} process{'es' if layout.world_size > 1 else ''}"
    by = f" by {options.launcher}" if layout.kind == "ddp" else ""
    return f"{layout.description}: {count}{by}, reduction {options.reduction}, numerics {options.numerics}"


def _steps(experiment: Experiment, samples: int) -> str:
    each = experiment.steps_per_epoch(samples)
    total = experiment.total_steps(each)
    cut = f", cut short by max_steps {experiment.max_steps}" if total < experiment.epochs * each else ""
    return f"{total} in all, {each} per epoch, {experiment.epochs} epochs{cut}"


def _data(request: Request, parts: BuiltExperiment) -> str:
    splits, name = parts.splits, request.loaded.experiment.data.name
    held_out = f", {len(splits.test)} held out" if splits.test is not None else ", none held out"
    place = request.options.data_dir
    return f"{name}: {len(splits.train)} samples to train{held_out}; all of it is there (--data-dir {place})"


def _model(experiment: Experiment, parts: BuiltExperiment) -> str:
    numbers = sum(parameter.numel() for parameter in parts.model.parameters())
    average = f"; averaged with ema_decay {experiment.ema_decay}" if experiment.ema_decay is not None else ""
    parts_of = f"loss {experiment.loss}; precision {experiment.precision}{average}"
    return f"{experiment.model.name}: {numbers:,} parameters; {parts_of}"


def memory_of(request: Request, parts: BuiltExperiment) -> str:
    """What each rank or replica needs at least, in words."""
    layout = request.layout
    needed = standing_memory(parts.model, request.loaded.experiment, Sharding.of(layout), layout.shares)
    holder = "rank" if layout.kind == "ddp" else "replica"
    return f"{in_units(sum(needed.values()))} for each {holder}: {', '.join(needed)}; activations come on top"


def _rule(part: Optimizer | Schedule | Component) -> str:
    """The name, and what is not as by default; of a function of the experiment's own, all of its options."""
    if isinstance(part, Component):
        name, chosen = f"{part.name} of the experiment's file", dict[str, Any](part.options)
    else:
        rate = {"lr": part.lr} if isinstance(part, Optimizer) else {}
        changed = {key: value for key, value in part if key != "name" and value != _default(part, key)}
        name, chosen = part.name, rate | changed
    return ", ".join([name, *(f"{key} {value}" for key, value in chosen.items())])


def _default(part: Frozen, name: str) -> Any:
    return type(part).model_fields[name].default


def _start(request: Request, samples: int) -> str:
    fork = find_fork(request, samples) if request.branches_off else None
    new = "at step 0, as a new run" if fork is None else f"at step {fork.step}, as a fork of {fork.run}"
    if request.resume == "never":
        return new
    if request.resume == "auto":
        found = find_resumable(request, samples)
        if found is None:
            return f"{new}: there is no unfinished run of this experiment with these settings"
    else:
        found = RunDirectory(Path(request.resume))
    checkpoint = newest_valid(found.checkpoints)
    return f"at step {checkpoint.step if checkpoint is not None else 0}, continuing {found.path}"


def _files(request: Request) -> str:
    options, layout = request.options, request.layout
    asked = {"trace/": options.profile, "ledger/": options.ledger}
    names = [
        *_FILES,
        *(name for name, wanted in asked.items() if wanted),
        *(f"{name}/" for name in options.log_to),
    ]
    place = Path(options.output) / request.loaded.experiment.name / f"{layout.label}-<time>-<id>"
    return f"{', '.join(names)} in {place}/"


def _checkpoints(request: Request) -> str:
    options = request.options
    when = f"every {options.checkpoint_every} steps" if options.checkpoint_every else "at the end of each epoch"
    also = f", those of every {options.keep_every} steps" if options.keep_every else ""
    return f"{when}; kept: the newest {options.keep_last}, the best one{also}"

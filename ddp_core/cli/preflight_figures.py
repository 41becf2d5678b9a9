"""What `ddp rehearse` tells of the whole run from a few steps of it: time, memory, disk, and what will be short."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.memory import free_memory
from ddp_core.checkpoint import find_checkpoints
from ddp_core.cli.doctor import in_units
from ddp_core.cli.dry_run import memory_of
from ddp_core.config.layout import Layout
from ddp_core.experiment.request import BuiltExperiment, Request
from ddp_core.record.reading import Run
from ddp_core.record.weights import WEIGHTS
from ddp_core.trainers.trainer import TRIED_BATCHES


@dataclass
class Expected:
    """The lines about the whole run by name, warnings, and what is lacking for it (4), if anything is."""

    lines: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    lack: UserError | None = None


def measured(run: Run | None) -> dict[str, str]:
    """The cells of a run's figures: the seconds of its last step, and the most memory that a rank has had."""
    figures = {} if run is None else run.figures
    seconds = None if run is None else _step_seconds(run)
    memory = figures.get("peak_memory_bytes")
    return {
        "step": "-" if seconds is None else _duration(seconds),
        "memory": "-" if memory is None else in_units(memory),
    }


def expectations(request: Request, parts: BuiltExperiment, layout: Layout, run: Run | None) -> Expected:
    """What the whole run will take, of which `run` has tried a few steps on `layout`; None where that has failed."""
    experiment, told = request.loaded.experiment, Expected()
    each = experiment.steps_per_epoch(len(parts.splits.train))
    total = experiment.total_steps(each)
    told.lines["whole run"] = f"{total} steps, {each} per epoch, on {request.layout.label}"
    told.lines["memory"] = memory_of(request, parts)
    if run is None:
        return told
    told.lines["memory"] += f"; {measured(run)['memory']} of the whole process, measured"
    _time(request, parts, layout, run, total, told)
    _disk(request, run, total, each, told)
    peak, (free, _) = run.figures.get("peak_memory_bytes"), free_memory()
    ranks = request.layout.nproc_per_node if request.layout.kind == "ddp" else 1
    if request.layout.device == "cpu" and peak and free is not None and ranks * peak > free:
        told.warnings.append(
            f"{ranks} ranks with {in_units(peak)} each need more memory than the {in_units(free)} that are free here"
        )
    return told


def _time(request: Request, parts: BuiltExperiment, layout: Layout, run: Run, total: int, told: Expected) -> None:
    """Add how long the run will take, from its last step, its evaluation and its save."""
    experiment, options = request.loaded.experiment, request.options
    seconds = _step_seconds(run)
    if seconds is None:
        return
    each = experiment.steps_per_epoch(len(parts.splits.train))
    epochs = -(-total // each)
    evaluation = 0.0
    if parts.splits.test is not None:
        batches = -(-len(parts.splits.test) // experiment.evaluation.samples_per_batch)
        evaluation = _seconds_between(run, "step", "evaluation") * max(1.0, batches / TRIED_BATCHES)
    evaluations = -(-epochs // experiment.evaluation.every_epochs)
    saves = total // options.checkpoint_every if options.checkpoint_every else epochs
    save = max((each["seconds"] for each in run.metrics if each["kind"] == "checkpoint"), default=0.0)
    whole = total * seconds + evaluations * evaluation + (0 if options.asynchronous_save else saves * save)
    where = "" if layout == request.layout else f", measured on {layout.label}"
    told.lines["time"] = (
        f"about {_duration(whole)}: {_duration(seconds)} a step, {_duration(evaluation)} an evaluation, "
        f"{_duration(save)} a save{where}"
    )
    if options.max_seconds is not None and whole > options.max_seconds:
        told.warnings.append(
            f"--max-seconds {options.max_seconds:g} will stop it before its end: continue it with --resume auto"
        )


def _disk(request: Request, run: Run, total: int, each: int, told: Expected) -> None:
    """Add how much the run will write, and whether there is room for it."""
    options = request.options
    newest = max(checkpoint.step for checkpoint in find_checkpoints(run.path / "checkpoints"))
    size = sum(file.stat().st_size for file in (run.path / "checkpoints").glob(f"step-{newest:09}*"))
    saves = total // options.checkpoint_every if options.checkpoint_every else -(-total // each)
    # The newest ones, the best one, and the one that is being written.
    kept = min(saves, options.keep_last + 1) + 1
    kept += total // options.keep_every if options.keep_every else 0
    needed = kept * size + (run.path / WEIGHTS).stat().st_size
    output = Path(options.output).absolute()
    there = next(place for place in (output, *output.parents) if place.exists())
    free = shutil.disk_usage(there).free
    told.lines["disk"] = (
        f"{in_units(needed)} at most: {kept} checkpoints of {in_units(size)}, and the weights; "
        f"{in_units(free)} are free for {options.output}"
    )
    if needed > free:
        told.lack = UserError(
            f"the run needs {in_units(needed)} of disk for {options.output}, and {in_units(free)} are free: make room, "
            "or keep fewer checkpoints (--keep-last, --keep-every)",
            ExitCode.RESOURCES,
        )


def _step_seconds(run: Run) -> float | None:
    """How long the last step took that was timed; None where none was."""
    samples: int = run.record["experiment"]["global_batch_size"]
    speeds = [record.get("samples_per_second") for record in run.metrics if record["kind"] == "step"]
    return next((samples / speed for speed in reversed(speeds) if speed), None)


def _seconds_between(run: Run, first: str, then: str) -> float:
    """The seconds from the last record of one kind to the last of the other; 0 where one is missing."""
    times: Mapping[str, Any] = {record["kind"]: record["time"] for record in run.metrics}
    return max(0.0, times[then] - times[first]) if first in times and then in times else 0.0


def _duration(seconds: float) -> str:
    """Seconds for people: 12 ms, 3.4 s, 5 min, 2 h 10 min, 3 days 4 h."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} days {minutes % 1440 // 60} h"

"""Turns what the user asked of `ddp train` into a request, and checks all that can be checked before workers start."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ddp_core.base.errors import UserError
from ddp_core.base.extras import require
from ddp_core.base.files import is_address
from ddp_core.base.refusals import MEND_OUTPUT, refused
from ddp_core.cli.devices import check_gpus, choose_layout, say_once
from ddp_core.config.cut import BatchCut
from ddp_core.config.experiment import Component, Experiment
from ddp_core.config.layout import Layout
from ddp_core.config.options import Asked, Options
from ddp_core.config.records import Numerics, ReductionKind
from ddp_core.distributed.stop import signal_named
from ddp_core.distributed.world import World, missing_nodes
from ddp_core.experiment.building import Kind, complete_options, resolve
from ddp_core.experiment.file import LoadedExperiment, Served, load_experiment
from ddp_core.experiment.request import Request, build_splits, check_promise, promise_broken_by
from ddp_core.numerics.limits import limits_hold, limits_missed, portable_refused_by
from ddp_core.record.directory import RunDirectory
from ddp_core.sharding import Sharding

_COMPONENTS: tuple[Kind, ...] = ("model", "data", "optimizer", "schedule")


def holds(numerics: Numerics) -> bool:
    """Whether this process computes with these numerics; with portable ones, if their limits were set before torch."""
    return numerics == "native" or limits_hold()


def prepare(asked: Asked, command: str, can_hold: Callable[[Numerics], bool] = holds) -> Request:
    """The request that `command` asks for; what it leaves open, the launcher and this machine decide.

    `can_hold` says whether this process computes with certain numerics, or will once it is started anew.
    """
    loaded = load_with_settings(asked.experiment, asked.settings, Path(asked.record) if asked.record else None)
    experiment = loaded.experiment
    world = World.from_environment()
    _check_nodes(asked, world)
    layout = choose_layout(asked, world)
    inexact_because = promise_broken_by(experiment)
    reduction = asked.reduction or experiment.reduction
    Sharding.of(layout).check(experiment, reduction == "plain", inexact_because, asked.cuda_graph)
    if asked.reduction is None and reduction == "exact" and inexact_because is not None:
        reduction = "plain"
        say_once(world, f"plain reduction instead of exact: {inexact_because}")
    numerics, why_native = _numerics(asked, experiment, layout, can_hold)
    output = asked.output
    if is_address(output):
        from ddp_core.remote import local

        output = str(local(output))
    decided = {
        "reduction": reduction,
        "numerics": numerics,
        "deterministic": _is_deterministic(asked, reduction, layout),
        "output": output,
        "launcher": "in-process" if layout.kind != "ddp" else "external" if World.is_set() else "torchrun",
    }
    options = Options(**asked.model_dump(include=set(Options.model_fields)) | decided)
    check_gpus(layout, options.reduction, options.backend, world)
    if why_native is not None:
        say_once(world, f"native numerics instead of portable: {why_native}")
    return Request(loaded, layout, options, asked.resume, command, asked)


def load_with_settings(name_or_path: str, settings: Sequence[str], record_file: Path | None = None) -> LoadedExperiment:
    """The experiment with its builders' defaults written out and `--set` applied. Raises UserError.

    With `record_file`, a run.json, the experiment is the one recorded there, with the settings applied. Its file then
    gives the functions only, and imports the modules that the run has kept.
    """
    if record_file is None:
        loaded = load_experiment(name_or_path)
        experiment = _with_settings(loaded, loaded.experiment, settings, is_complete=False)
        resolve(loaded, "loss", experiment.loss)
        return replace(loaded, experiment=experiment)
    from ddp_core.experiment.kept_source import serve_modules
    from ddp_core.record.recorded import recorded_experiment

    record = RunDirectory(record_file.parent).read()
    # Its file gives the functions only, and imports the modules that the run has kept.
    # Absolute, because a worker may start in another folder.
    folder = record_file.parent.absolute() / record["source"]["folder"]
    served = Served(str(folder), record["source"]["modules"])
    serve_modules(served)
    loaded = load_experiment(name_or_path)
    experiment = _with_settings(loaded, recorded_experiment(record), settings, is_complete=True)
    return replace(loaded, experiment=experiment, served=served)


def _with_settings(
    loaded: LoadedExperiment, record: Experiment, settings: Sequence[str], is_complete: bool
) -> Experiment:
    """The experiment with settings, and builders' defaults written out: of all, or of new ones if it `is_complete`."""
    # A component that a setting names anew begins without the options of the one that it replaces.
    components = [name for name in _COMPONENTS if isinstance(getattr(record, name), Component)]
    names: dict[str, Kind] = {f"{component}.name": component for component in components}
    named = {setting: names[name] for setting in settings if (name := setting.partition("=")[0].strip()) in names}
    for setting, kind in named.items():
        component = getattr(record, kind)
        record = record.model_copy(update={kind: component.model_copy(update={"options": {}})})
        record = record.with_settings([setting])
    for kind in dict.fromkeys(named.values() if is_complete else components):
        component = getattr(record, kind)
        completed = complete_options(component, resolve(loaded, kind, component.name), kind)
        record = record.model_copy(update={kind: completed})
    return record.with_settings([setting for setting in settings if setting not in named])


def _check_nodes(asked: Asked, world: World) -> None:
    """Raises UserError (2) where several nodes have no place to meet, (6) where the launcher started another number."""
    if asked.layout != "ddp":
        return
    low, high = asked.nnodes
    if not World.is_set():
        if high > 1 and not (asked.rdzv_endpoint and asked.rdzv_id):
            raise UserError(
                f"--nnodes {asked.nnodes} needs --rdzv-endpoint HOST:PORT (start `ddp rendezvous` there) "
                "and the same fresh --rdzv-id on every node"
            )
    elif "nnodes" in asked.model_fields_set and low == high != world.nnodes:
        raise missing_nodes(high, world.nnodes)


def _numerics(
    asked: Asked, experiment: Experiment, layout: Layout, can_hold: Callable[[Numerics], bool]
) -> tuple[Numerics, str | None]:
    """The numerics that were asked for, else the experiment's own; or native, and why portable ones cannot be had."""
    wanted = asked.numerics or experiment.numerics
    reason = None
    if wanted == "portable":
        on_gpu = "it is for CPUs, and this run is on a GPU" if layout.device == "cuda" else None
        reason = on_gpu or portable_refused_by()
    if reason is None:
        if can_hold(wanted):
            return wanted, None
        reason = limits_missed()
    if asked.numerics == "portable":
        raise UserError(f"--numerics portable: {reason}")
    return "native", reason


def _is_deterministic(asked: Asked, reduction: ReductionKind, layout: Layout) -> bool:
    """Whether kernels must repeat their bits. Raises UserError where the exact reduction is asked to do without."""
    if asked.deterministic == "never" and reduction == "exact":
        raise UserError(
            "--deterministic never: the exact reduction has the same bits on every layout only with kernels that "
            "repeat theirs; leave this option out, or use --reduction plain"
        )
    if asked.deterministic == "auto":
        return reduction == "exact" or layout.device == "cpu"
    return asked.deterministic == "always"


def check_request(request: Request, only_look: bool = False) -> None:
    """Check all that can be checked without starting a process; make the output folder, unless it shall `only_look`."""
    experiment, options = request.loaded.experiment, request.options
    if options.profile:
        from ddp_core.observe.profiling import parse_window

        parse_window(options.profile)
    if options.stop_signal:
        signal_named(options.stop_signal)
    if options.faults:
        from ddp_core.observe.faults import Fault

        flips = "flip" in [Fault.parse(fault).kind for fault in options.faults]
        if flips and options.cuda_graph:
            raise UserError("--cuda-graph: no bit can be flipped within a recorded backward; leave out --fault flip@…")
    if options.log_to:
        require("--log-to tensorboard", "tensorboard")
    BatchCut.of(experiment, request.layout)
    check_promise(request)
    if options.guard == "strict" and options.reduction != "exact":
        raise UserError(
            "--guard strict: the plain reduction promises nothing that could be checked; use --reduction exact, or "
            "leave --guard out"
        )
    if options.keep_for_audit is not None and options.reduction != "exact":
        raise UserError(
            "--keep-for-audit: the bits of the plain reduction belong to one layout, so nobody could check them "
            "elsewhere; use --reduction exact, or leave --keep-for-audit out"
        )
    if options.cuda_graph:
        _check_graph(request)
    if request.resume not in ("auto", "never") and not (Path(request.resume) / "run.json").exists():
        raise UserError(
            f"--resume {request.resume}: no run directory there (it has no run.json); use auto, never, or a run's path"
        )
    _check_fork(request)
    given = request.asked.init_from
    if given is not None and request.resume == "never" and not Path(given).exists():
        raise UserError(f"--init-from {given}: there is no such run or file")
    splits = build_splits(request.loaded, Path(request.options.data_dir))
    if request.resume not in ("auto", "never"):
        from ddp_core.record.continuing import require_continuable

        require_continuable(RunDirectory(Path(request.resume)), request, len(splits.train))
    elif request.resume == "never" and request.asked.fork is not None:
        from ddp_core.record.changes import find_fork

        find_fork(request, len(splits.train))
    if request.evaluated is None:
        _check_output(Path(options.output), only_look)


def _check_fork(request: Request) -> None:
    """Raises UserError where options contradict --fork, or the run is not there."""
    asked = request.asked
    if asked.fork is None:
        if asked.at is not None:
            raise UserError(
                f"--at {asked.at} is the step of the checkpoint that --fork RUN begins with; add --fork RUN"
            )
        return
    if asked.init_from is not None:
        raise UserError("--fork takes the weights of its checkpoint, and --init-from others: give one of them")
    if request.resume not in ("auto", "never"):
        raise UserError(
            f"--fork begins a new run, and --resume {request.resume} continues that one: give one of them "
            "(--resume auto continues a fork that was stopped)"
        )


def _check_graph(request: Request) -> None:
    """Raises UserError where this request cannot have the CUDA graph that it asks for."""
    layout, options = request.layout, request.options
    if layout.device != "cuda":
        raise UserError("--cuda-graph needs a GPU, and this run is on the CPU; leave it out")
    if layout.kind == "dp":
        raise UserError("--cuda-graph: the threads of dp cannot record at the same time; use --layout single or ddp")
    if layout.kind == "ddp" and options.reduction == "plain":
        raise UserError(
            "--cuda-graph: DistributedDataParallel sends gradients from within backward, which no graph holds; "
            "use --reduction exact, which can send them afterwards"
        )


def _check_output(output: Path, only_look: bool) -> None:
    """Raises UserError (4) where the folder cannot be made or written to."""
    try:
        there = next(place for place in (output, *output.absolute().parents) if place.exists())
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if not only_look:
            output.mkdir(parents=True, exist_ok=True)
            # A random name, because other nodes of the launch may test the same folder at the same moment.
            with tempfile.TemporaryFile(dir=output):
                pass
    except OSError as error:
        raise refused(error, output, todo=MEND_OUTPUT) from None

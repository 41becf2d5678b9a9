"""From a command's words to a request: experiment with its settings, layout, options, all checked before a process is
started.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ddp_core.errors import ExitCode, UserError
from ddp_core.faults import Fault
from ddp_core.observe.profiling import parse_window
from ddp_core.run.directory import RunDirectory, require_experiment
from ddp_core.run.experiment_file import LoadedExperiment, complete_options, load_experiment, resolve
from ddp_core.run.request import Request, build_splits, check_promise
from ddp_core.spec.cut import BatchCut
from ddp_core.spec.experiment import Experiment
from ddp_core.spec.layout import Layout


def load_with_settings(name_or_path: str, settings: Sequence[str], record_file: Path | None = None) -> LoadedExperiment:
    """The experiment with its builders' defaults written out and `--set` applied. Raises UserError.

    With `record_file`, a run.json, the experiment is the one recorded there; the file gives the builders only.
    """
    loaded = load_experiment(name_or_path)
    if record_file is not None:
        recorded = Experiment.from_json(RunDirectory(record_file.parent).read()["experiment"])
        return replace(loaded, experiment=recorded)
    naming = [setting for setting in settings if setting.partition("=")[0].strip() in ("model.name", "data.name")]
    record = loaded.experiment
    for setting in naming:
        section, _, _ = setting.partition(".")
        component = getattr(record, section)
        record = record.model_copy(update={section: component.model_copy(update={"options": {}})})
        record = record.with_settings([setting])
    model = complete_options(record.model, resolve(loaded, "model", record.model.name))
    data = complete_options(record.data, resolve(loaded, "data", record.data.name))
    record = record.model_copy(update={"model": model, "data": data})
    record = record.with_settings([setting for setting in settings if setting not in naming])
    resolve(loaded, "loss", record.loss)
    return replace(loaded, experiment=record)


def choose_layout(kind: str, device: str, nnodes: int, nproc_per_node: int | None, backend: str) -> Layout:
    """The layout, with `auto` decided by what is here. Raises UserError (4) where there are fewer GPUs than asked
    for.
    """
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        device = "cuda" if found else "cpu"
    if nproc_per_node is None:
        nproc_per_node = 1 if kind == "single" else max(found, 1) if device == "cuda" else 2
    layout = Layout.model_validate({"kind": kind, "device": device, "nnodes": nnodes, "nproc_per_node": nproc_per_node})
    layout.check()
    if device == "cuda" and found < nproc_per_node and not (found and kind == "ddp" and backend == "gloo"):
        fewer = f"--nproc-per-node {found} --device cuda" if found and kind != "single" else None
        count = nproc_per_node if kind != "single" else 1
        choices = [
            choice
            for choice in (fewer, f"--device cpu --nproc-per-node {count}" if count > 1 else "--device cpu")
            if choice
        ]
        raise UserError(
            f"asked for {count} CUDA device{'s' if count > 1 else ''}, found {found}; what would run here: "
            + " or ".join(f"--layout {kind} {choice}" for choice in choices),
            ExitCode.RESOURCES,
        )
    return layout


def check_request(request: Request) -> None:
    """Everything that can be known to fail without starting a process. Raises UserError."""
    experiment = request.loaded.experiment
    if request.options.profile:
        parse_window(request.options.profile)
    for fault in request.options.faults:
        Fault.parse(fault)
    BatchCut.of(experiment, request.layout)
    check_promise(request)
    if request.resume not in ("auto", "never") and not (Path(request.resume) / "run.json").exists():
        raise UserError(
            f"--resume {request.resume}: no run directory there (it has no run.json); use auto, never, or a run's path"
        )
    if request.resume not in ("auto", "never"):
        require_experiment(RunDirectory(Path(request.resume)), experiment)
    build_splits(request.loaded, Path(request.options.data_dir))
    _check_output(Path(request.options.output))


def _check_output(output: Path) -> None:
    try:
        output.mkdir(parents=True, exist_ok=True)
        # A name of its own: other nodes of the launch look at the same moment.
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise UserError(
            f"cannot write to {output}: {error.strerror}; choose another with --output DIR, or mend its owner and mode",
            ExitCode.RESOURCES,
        ) from None

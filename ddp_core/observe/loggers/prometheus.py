"""Prometheus: one file of text per run, in the folder that DDP_PROMETHEUS_DIR names, for node_exporter to read.

Every series has the labels `run`, the run directory's name, and `experiment`. A later attempt replaces the file of the
one before. docs/how-to/log-to-prometheus.md lists the metrics.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Enum, Gauge, write_to_textfile

from ddp_core.base.errors import UserError
from ddp_core.observe.loggers.logged import Ending, LoggedRun

_VARIABLE = "DDP_PROMETHEUS_DIR"
_STATES = ["running", "completed", "stopped", "failed"]
_LEAST_SECONDS = 1.0
"""Prometheus asks every 15 seconds or more rarely, but a run may write a thousand records a second."""

_OF_A_STEP = {
    "loss": ("ddp_loss", "Mean loss over the last recorded global batch."),
    "lr": ("ddp_learning_rate", "Learning rate of the last recorded step."),
    "samples_per_second": ("ddp_samples_per_second", "Speed since the record before, without evaluations and saves."),
    "data_wait": ("ddp_data_wait_ratio", "Share of the time since the record before that was spent waiting for data."),
}
"""For the numbers of a step's record, the metric and what it is."""


def require_folder() -> None:
    """Raises UserError where DDP_PROMETHEUS_DIR names no folder that can be written to."""
    folder = os.environ.get(_VARIABLE)
    if not folder:
        raise UserError(
            f"--log-to prometheus writes a file into the folder that {_VARIABLE} names: set it to the folder of "
            "node_exporter's --collector.textfile.directory"
        )
    if not Path(folder).is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(
            f"{_VARIABLE} is {folder}, which is no folder that can be written to; make it, or mend the name"
        )


class RunLogger:
    """The last values of one run, written at most once a second, and at once when something else than a step ends."""

    def __init__(self, run: LoggedRun) -> None:
        self._file = str(Path(os.environ[_VARIABLE]) / f"ddp-{run.experiment}-{run.name}.prom")
        self._names = {"run": run.name, "experiment": run.experiment}
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._next = 0.0
        shown = {name: str(run.settings[name]) for name in ("layout", "reduction") if name in run.settings}
        self._set("ddp_run_info", "Always 1; the labels tell what the run is.", 1, **shown)
        self._status = Enum(
            "ddp_run_status", "How the run stands.", self._names, states=_STATES, registry=self._registry
        ).labels(**self._names)
        self._checkpoints = Counter(
            "ddp_checkpoints", "Checkpoints saved by this attempt.", self._names, registry=self._registry
        ).labels(**self._names)
        if run.total_steps is not None:
            self._set("ddp_planned_steps", "Optimizer updates of the whole run.", run.total_steps)
        self._write()

    def record(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        self._set("ddp_step", "Optimizer updates made; a resume goes back to its checkpoint.", step)
        self._set("ddp_last_record_timestamp_seconds", "When the run last wrote a record, in Unix time.", time.time())
        if kind == "step":
            for name in _OF_A_STEP.keys() & values.keys():
                self._set(*_OF_A_STEP[name], values[name])
        elif kind == "evaluation":
            for name, value in values.items():
                self._set("ddp_evaluation", "Figures of the last evaluation.", value, figure=name)
        elif kind == "checkpoint":
            self._checkpoints.inc()
            if "seconds" in values:
                self._set("ddp_checkpoint_pause_seconds", "How long the last save held training up.", values["seconds"])
        if kind != "step" or time.monotonic() >= self._next:
            self._write()

    def finish(self, figures: Mapping[str, float], weights_sha256: str) -> None:
        for name, value in figures.items():
            self._set("ddp_result", "Figures of the finished run.", value, figure=name)

    def close(self, ending: Ending) -> None:
        self._status.state(ending)
        self._write()

    def _set(self, name: str, meaning: str, value: float, **labels: str) -> None:
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, meaning, [*self._names, *labels], registry=self._registry)
        self._gauges[name].labels(**self._names, **labels).set(value)

    def _write(self) -> None:
        self._next = time.monotonic() + _LEAST_SECONDS
        # It writes beside the file and renames, so that node_exporter never reads half of it.
        write_to_textfile(self._file, self._registry)

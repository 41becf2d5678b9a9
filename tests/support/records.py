"""The whole content of a run.json, without a run, and what a rank tells of itself at the end."""

from __future__ import annotations

from typing import Any

from ddp_core.config.experiment import Component, Experiment
from ddp_core.config.layout import Layout
from ddp_core.config.options import Options
from ddp_core.record.directory import RECORD_FORMAT

EXPERIMENT = Experiment(name="mine", model=Component(name="mlp"), data=Component(name="digits"), global_batch_size=8)


NO_USAGE: Any = {
    **dict.fromkeys(("memory_at_start_bytes", "step_memory_bytes", "peak_memory_bytes"), 0),
    **dict.fromkeys(("machine_cores_busy", "own_cores_busy", "cpu_utilisation"), 0.0),
    **dict.fromkeys(("device_free_bytes", "gpu_utilisation")),
    "machine": "here",
}
"""Of a rank that has used nothing."""


def a_record(experiment: Experiment = EXPERIMENT, layout: Layout | None = None, **fields: Any) -> dict[str, Any]:
    """The fields that every version of ddp has written, for a run that has just begun, with `fields` in their place."""
    layout = layout or Layout()
    record = {
        "format": RECORD_FORMAT,
        "experiment": experiment.to_json(),
        "experiment_sha256": experiment.digest(),
        "experiment_file": "mine.py",
        "question": "Is it the same?",
        "layout": layout.model_dump() | {"label": layout.label, "description": layout.description},
        "options": Options().model_dump(mode="json"),
        "command": "ddp train mine",
        "launch_id": None,
        "status": "running",
        "exit_code": None,
        "message": None,
        "started_at": "2026-01-01T00:00:00Z",
        "finished_at": None,
        "attempts": [an_attempt(layout)],
        "data_sha256": "d" * 64,
        "weights_sha256": None,
        "optimizer_sha256": None,
        "result": {},
        "fingerprint": {"torch": "2.13.0", "threads": 1},
        "fingerprint_changed": False,
        "environment": {
            "python": "3.12.0",
            "packages": {"torch": "2.13.0"},
            "code": {"version": "0.1.0", "commit": None, "dirty": None},
        },
    }
    if fields.get("status") == "completed":
        record |= {"exit_code": 0, "weights_sha256": "a" * 64, "result": {"steps": 8}}
    return record | fields


def an_attempt(layout: Layout | None = None, **fields: Any) -> dict[str, Any]:
    """One entry of `attempts`."""
    layout = layout or Layout()
    return {"layout": layout.model_dump(), "started_at": "2026-01-01T00:00:00Z", "restart_count": 0} | fields

"""Run directories as they look while a run grows, made without a run."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from ddp_core.config.layout import Layout
from ddp_core.observe.heartbeat import boot_id
from ddp_core.observe.metrics import MetricsWriter
from ddp_core.record.directory import RunDirectory
from tests.support.records import EXPERIMENT, a_record, an_attempt

TWO_RANKS = Layout(kind="ddp", nproc_per_node=2)


def utc(moment: float) -> str:
    """The moment as run.json writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))


def begin(path: Path, *, ago: float = 60.0, layout: Layout | None = None, **fields: Any) -> RunDirectory:
    """A run of 100 steps that has begun `ago` seconds ago and has written its record."""
    directory = RunDirectory(path)
    directory.checkpoints.mkdir(parents=True)
    started = utc(time.time() - ago)
    attempts = [an_attempt(layout) | {"started_at": started}]
    known = {"started_at": started, "attempts": attempts, "total_steps": 100, "steps_per_epoch": 10}
    directory.write(a_record(EXPERIMENT.model_copy(update={"epochs": 10}), layout, **known | fields))
    return directory


def train(directory: RunDirectory, first: int, last: int, seconds_per_step: float = 1.0) -> None:
    """Write the records of these steps, the last of which was made now; the loss of step N is 1/N."""
    with directory.metrics.open("a") as file:
        for step in range(first, last + 1):
            written = time.time() - (last - step) * seconds_per_step
            record = {"kind": "step", "time": written, "step": step, "epoch": (step - 1) // 10, "loss": 1 / step}
            file.write(json.dumps(record | {"samples_per_second": 80.0, "data_wait": 0.25}) + "\n")


def note(directory: RunDirectory, kind: str, **fields: Any) -> None:
    """Write one record of another kind."""
    with MetricsWriter(directory.metrics) as metrics:
        metrics.write(kind, **fields)


def beat(
    directory: RunDirectory, rank: int, *, step: int = 0, age: float = 0.0, mean: float = 0.01, **other: Any
) -> None:
    """Write the heartbeat of a rank, by default of this very process."""
    speed = {"median_seconds": mean, "mean_seconds": mean, "p95_seconds": mean}
    facts = {"rank": rank, "node_rank": 0, "host": socket.gethostname(), "address": "127.0.0.1", "pid": os.getpid()}
    clocks = {"boot": boot_id(), "monotonic": time.monotonic() - age, "time": time.time() - age, "sequence": 1}
    (directory.path / "heartbeats").mkdir(exist_ok=True)
    file = directory.path / "heartbeats" / f"rank-{rank}.json"
    file.write_text(json.dumps(facts | clocks | speed | {"step": step} | other))

"""Trains by the command, as a user does, and returns what the run has left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Trained(NamedTuple):
    """A finished run."""

    metrics: list[dict[str, Any]]
    """The lines of metrics.jsonl."""
    record: dict[str, Any]
    """The content of run.json."""
    seconds: float
    """How long the command took."""

    @property
    def step_seconds(self) -> float:
        """Seconds from the end of the first step to that of the last one."""
        times = [line["time"] for line in self.metrics if line["kind"] == "step"]
        return float(times[-1] - times[0])


def trained(words: Sequence[str], output: Path | None = None) -> Trained:
    """The run of `ddp train` with these words, on the CPU with one thread for each process, and a line for each step.

    Its output goes into `output`, or into a folder of its own. Raises CalledProcessError where it fails.
    """
    with tempfile.TemporaryDirectory() as place:
        output = output or Path(place)
        words = ("train", *words, "--device", "cpu", "--output", str(output), "--log-every", "1")
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "ddp_core", *words], check=True, capture_output=True, env=environment)
        seconds = time.perf_counter() - began
        file = max(output.glob("*/*/run.json"), key=lambda file: file.stat().st_mtime_ns)
        lines = [json.loads(line) for line in file.with_name("metrics.jsonl").read_text().splitlines()]
        return Trained(lines, json.loads(file.read_text()), seconds)

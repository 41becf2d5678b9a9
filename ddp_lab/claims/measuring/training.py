"""Training runs for a claim: `ddp train` as a user would start it, and what its run directory then says."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.observe.metrics import read_metrics
from ddp_core.record.directory import find_runs
from ddp_lab.claims.framework.setting import Setting


@dataclass(frozen=True)
class TrainedRun:
    """A run directory that a claim made."""

    path: Path
    exit_code: int
    record: dict[str, Any]

    def metrics(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, of one kind or all."""
        return read_metrics(self.path / "metrics.jsonl", kind)

    def weights(self) -> dict[str, Any]:
        """The final weights, tensors by name."""
        from safetensors.torch import load_file

        return dict(load_file(self.path / "model.safetensors"))


def train(
    setting: Setting,
    claim: str,
    experiment: str,
    layout: str = "single",
    nproc_per_node: int = 1,
    settings: Sequence[str] = (),
    options: Sequence[str] = (),
    device: str | None = None,
    timeout: float = 300,
    must_succeed: bool = True,
    environment: dict[str, str] | None = None,
) -> TrainedRun:
    """Run `ddp train` below the claim's own output directory.

    `settings` are what `--set` takes, `options` further words of the command, `environment` further variables of its
    processes. Without a `device`, it is CUDA where each process has a device of its own, else the CPU. Raises UserError
    with the command's last line where it fails (unless `must_succeed` is false), takes longer than `timeout` seconds,
    or leaves no run directory.
    """
    output = setting.runs(claim)
    before = {directory.path for directory, _ in find_runs(output)}
    words = [sys.executable, "-m", "ddp_core", "train", experiment, "--layout", layout, "--output", str(output)]
    words += ["--device", device or setting.device_type(nproc_per_node)]
    if layout != "single":
        words += ["--nproc-per-node", str(nproc_per_node)]
    for assignment in settings:
        words += ["--set", assignment]
    code, said = run_command([*words, *options], timeout, environment)
    made = [(directory, record) for directory, record in find_runs(output) if directory.path not in before]
    if (code and must_succeed) or not made:
        raise UserError(f"`ddp {' '.join(words[3:])}` ended with {code}: {said or 'it said nothing'}")
    directory, record = made[-1]
    return TrainedRun(directory.path, code, dict(record))


def run_command(words: Sequence[str], timeout: float, environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Run a command in a process group of its own; returns the exit code and the last line that says an error.

    Where none does, it is the last one. All processes are gone afterwards. Raises UserError after `timeout` seconds.
    """
    root = str(Path(__file__).parents[3])
    variables = os.environ | (environment or {}) | {"OMP_NUM_THREADS": "1"}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [root, variables.get("PYTHONPATH", "")]))
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=variables,
    )
    try:
        said, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise UserError(f"`{' '.join(words)}` took longer than {timeout:.0f} s", ExitCode.RESOURCES) from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    lines = said.strip().splitlines()
    errors = [line for line in lines if "error: " in line]
    return process.returncode, (errors or lines or [""])[-1]

"""Write a benchmark's results with what is needed to judge them: the command, the machine and the versions."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from ddp_core.base.fingerprint import cpu_model

RESULTS = Path(__file__).parent / "results"


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """Versions and hardware: plain values."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "gpus": gpus,
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "torch_threads": torch.get_num_threads(),
    }


def record(name: str, command: str | Sequence[str], results: Any, path: str | Path | None = None) -> Path:
    """Write `results` (anything JSON can hold) to `path`, by default benchmarks/results/NAME.json; return where.

    The file holds `benchmark`, `command`, `date` (UTC), `machine` and `results`.
    """
    target = Path(path) if path is not None else RESULTS / f"{name}.json"
    content = {
        "benchmark": name,
        "command": command if isinstance(command, str) else " ".join(command),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": machine(),
        "results": results,
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(content, indent=2) + "\n")
    return target

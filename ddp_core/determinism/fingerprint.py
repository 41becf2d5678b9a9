"""Fingerprints: the software, hardware and settings that a result depends on, bit for bit, recorded and compared."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def fingerprint(device: torch.device) -> dict[str, Any]:
    """What a result depends on, bit for bit: build, instruction set or GPU model, threads, kernel settings."""
    import numpy as np
    import torch

    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "mkldnn": bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled),
        "environment": {
            name: os.environ[name]
            for name in ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
            if name in os.environ
        },
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "device": "cpu",
    }
    if device.type == "cuda":
        facts |= {
            "device": torch.cuda.get_device_name(device),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "tf32": torch.backends.cuda.matmul.allow_tf32,
        }
    else:
        facts["cpu"] = cpu_model()
    return facts


def cpu_model() -> str:
    """The processor's model name, as the operating system reports it."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Where two fingerprints differ, as 'name: here A, there B'; empty where equal results are promised."""
    names = sorted(set(ours) | set(theirs))
    return [
        f"{name}: here {ours.get(name)}, there {theirs.get(name)}"
        for name in names
        if ours.get(name) != theirs.get(name)
    ]

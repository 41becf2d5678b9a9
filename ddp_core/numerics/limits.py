"""The environment variables that limit torch's libraries to instructions that every x86-64 CPU with AVX2 has.

torch reads them when it is loaded, so they must be set before that. This module does not load torch.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

RULES = 2
"""Version of what `portable` limits and replaces; whoever changes that so that bits may change, raises it."""

LIMITS: Mapping[str, str] = {
    # torch's own kernels.
    "ATEN_CPU_CAPABILITY": "avx2",
    # oneDNN: convolutions.
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    # MKL: products that are not chains. Its AVX2 branch gives other bits on CPUs of Intel than on those of AMD.
    "MKL_CBWR": "COMPATIBLE",
}


def rules_of(numerics: str) -> int | None:
    """The version of the rules by which `portable` computes; None for native."""
    return None if numerics == "native" else RULES


def limits_hold() -> bool:
    """Whether the limits are set and, if torch is loaded already, whether it was loaded with them."""
    if any(os.environ.get(name) != value for name, value in LIMITS.items()):
        return False
    torch = sys.modules.get("torch")
    return torch is None or torch.backends.cpu.get_cpu_capability() == "AVX2"


def limits_missed() -> str:
    """The message for a process that has loaded torch without the limits."""
    variables = shlex.join(f"{name}={value}" for name, value in LIMITS.items())
    return f"torch was loaded without the limits of portable numerics; set {variables} before it is imported"


def portable_refused_by(cpus: Path = Path("/proc/cpuinfo")) -> str | None:
    """Why this machine cannot have portable numerics; None where it can, as far as is known without loading torch.

    `cpus`: where Linux says what its CPUs can do.
    """
    machine = platform.machine()
    if machine.lower() not in ("x86_64", "amd64"):
        return f"it is for x86-64 CPUs, and this machine is {machine or 'of an unknown kind'}"
    try:
        lines = cpus.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    flags = [line.split() for line in lines if line.startswith("flags")]
    if flags and "avx2" not in flags[0]:
        return "it needs a CPU with AVX2, which this one does not have"
    return None

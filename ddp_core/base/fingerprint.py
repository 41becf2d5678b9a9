"""Fingerprints: the software, hardware and settings that a result depends on, bit for bit, recorded and compared."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_LATER = ("torch_files", "libm")
"""Facts that older records lack."""
_OF_LIBM = ("acosh", "asinh", "atan", "atanh", "cosh", "expm1", "lgamma", "log1p", "sinh", "tan", "tanh", "tgamma")


def fingerprint(device: torch.device, rules: int | None = None) -> dict[str, Any]:
    """What a result depends on, bit for bit: build, instruction set or GPU model, threads, kernel settings.

    With portable numerics, `rules` is the version of their rules; it replaces everything that differs between CPUs.
    """
    import numpy as np
    import torch

    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "mkldnn": bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled),
        "libm": _libm(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "device": "cpu",
    }
    if rules is not None:
        del facts["threads"]  # their number changes no bit
        return facts | {"numerics": "portable", "numerics_rules": rules}
    facts |= {
        "torch_files": _torch_files(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "environment": _set_among("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            # A GPU that is cut into parts (MIG) keeps its name, but has fewer of these for its kernels.
            "multiprocessors": properties.multi_processor_count,
            # cuDNN and cuBLAS choose kernels by the memory that they may have.
            "memory_bytes": properties.total_memory,
            "driver": driver(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "cublas": installed("nvidia-cublas", "nvidia-cublas-cu12"),
            "nccl": installed("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
            **cuda_switches(),
        }
    else:
        facts["cpu"] = cpu_model()
    return facts


def cuda_switches() -> dict[str, Any]:
    """Torch's settings and the variables that decide which kernels run on CUDA, and how finely they multiply."""
    from torch.backends import cuda, cudnn

    return {
        # "tf32", or "ieee" or "none" for the full product. Read by this name, because reading `allow_tf32` raises where
        # an experiment's file has set the two kinds of switches to different values.
        "tf32": {"matmul": cuda.matmul.fp32_precision, "conv": cudnn.conv.fp32_precision},  # type: ignore[attr-defined]
        "cudnn_benchmark": cudnn.benchmark,
        "reduced_precision_sums": {
            "fp16": cuda.matmul.allow_fp16_reduced_precision_reduction,
            "bf16": cuda.matmul.allow_bf16_reduced_precision_reduction,
        },
        "blas": str(cuda.preferred_blas_library()),
        "cuda_environment": _set_among(
            "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "NVIDIA_TF32_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT"
        ),
    }


def driver() -> str | None:
    """The version of NVIDIA's driver; None where its library does not tell."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


@cache
def _torch_files() -> str | None:
    """SHA-256 over the digests that torch's wheel lists of its libraries; None where torch came from no wheel."""
    try:
        record = metadata.distribution("torch").read_text("RECORD") or ""
    except metadata.PackageNotFoundError:
        return None
    # No kernel is in libtorch_python.so, which is another one for each Python.
    lines = sorted(line for line in record.splitlines() if line.startswith("torch/lib/") and "python" not in line)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest() if lines else None


@cache
def _libm() -> str | None:
    """A digest of what functions of the C library give, in float32; None where it has not all of them."""
    # torch calls them, and glibc 2.43 rounds them otherwise than 2.36.
    values, library = [], ctypes.CDLL(None)
    for name in _OF_LIBM:
        function = getattr(library, f"{name}f", None)
        if function is None:
            return None
        function.argtypes, function.restype = [ctypes.c_float], ctypes.c_float
        values += [function(number / 16 + (name == "acosh")) for number in range(1, 16)]
    return hashlib.sha256(struct.pack(f"{len(values)}f", *values)).hexdigest()[:16]


@cache
def installed(*names: str) -> str | None:
    """The version of the first of these packages that is installed."""
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def _set_among(*names: str) -> dict[str, str]:
    """Those of the environment variables that are set."""
    return {name: os.environ[name] for name in names if name in os.environ}


def cpu_model() -> str:
    """The processor's model name, as the operating system reports it."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    told = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return told[0] if told else platform.processor() or platform.machine()


def of_all_ranks(every: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fingerprint of a run from those of its ranks: rank 0's, and in `unlike_ranks` how others differ from it."""
    differences = {str(rank): fingerprint_differences(every[0], theirs) for rank, theirs in enumerate(every)}
    unlike = {rank: found for rank, found in differences.items() if found}
    return {**every[0], **({"unlike_ranks": unlike} if unlike else {})}


def fingerprint_differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Where two fingerprints differ, as 'name: here A, there B'; empty where equal results are promised."""
    # Where one is of native and the other of portable numerics, or of another version of their rules, nothing else is
    # named: they hold different facts. Facts that older records lack count where both have them.
    for name, usual in (("numerics", "native"), ("numerics_rules", None)):
        here, there = (each.get(name, usual) for each in (ours, theirs))
        if here != there:
            return [f"{name}: here {here}, there {there}"]
    return [
        f"{name}: here {ours.get(name)}, there {theirs.get(name)}"
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name) and not (name in _LATER and (name not in ours or name not in theirs))
    ]

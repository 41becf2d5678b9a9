"""Random numbers keyed by position instead of carried along, deterministic kernels, and digests of what came out.

Nothing here depends on rank, worker or history: dropout is keyed by (seed, step, micro-batch), augmentation by
(seed, epoch, sample id). So a checkpoint needs no random state and a resume needs no replay. The mixing function is
splitmix64's finaliser (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(*words: int) -> int:
    """A 64-bit key from integers; neighbouring inputs give unrelated keys."""
    state = 0
    for word in words:
        state = (state ^ (word & _MASK)) + _GOLDEN & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def _mix_array(words: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    words = words + np.uint64(_GOLDEN)
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)


def sample_uniforms(
    seed: int, epoch: int, ids: np.ndarray[Any, np.dtype[np.int64]], draws: int
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Uniform numbers in [0, 1) for each sample, keyed by (seed, epoch, sample id): float64 of shape [len(ids),
    draws].
    """
    per_sample = _mix_array(ids.astype(np.uint64) ^ np.uint64(mix(seed, epoch, 1)))
    words = _mix_array(per_sample[:, None] + np.arange(draws, dtype=np.uint64) * np.uint64(_GOLDEN))
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


class MicroBatchSeed:
    """Seeds torch's generator of one device for one micro-batch, keyed by (seed, step, micro-batch).

    `torch.manual_seed` would seed every device and costs about 100 microseconds; this costs about one.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        if device.type == "cuda":
            torch.cuda.init()
            self.generator: torch.Generator = torch.cuda.default_generators[device.index or 0]
        else:
            self.generator = torch.default_generator

    def __call__(self, step: int, micro_batch: int) -> None:
        self.generator.manual_seed(mix(self.seed, step, micro_batch, 2) >> 1)


def make_deterministic() -> None:
    """Choose deterministic kernels and full float32 products; called once per process before any CUDA work."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Else every new tensor is filled with NaN first, for the sake of programs that read what they never wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False


def weights_digest(state: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over a state dict, the `weights_sha256` of run.json.

    For each entry in sorted key order: the UTF-8 name, NUL, the dtype's name, NUL, the shape as decimal numbers
    joined by commas, NUL, then the
    raw little-endian bytes.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        shape = ",".join(str(size) for size in tensor.shape)
        digest.update(f"{name}\0{str(tensor.dtype).removeprefix('torch.')}\0{shape}\0".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    return digest.hexdigest()


def optimizer_digest(optimizer: torch.optim.Optimizer) -> str:
    """SHA-256 over the optimizer's tensors (momenta, second moments, step counts), by parameter number and name."""
    return weights_digest(dict(_optimizer_tensors(optimizer)))


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for number, entries in optimizer.state_dict()["state"].items():
        for name, value in entries.items():
            if value is not None:
                yield f"{number:06d}.{name}", torch.as_tensor(value)


def fingerprint(device: torch.device) -> dict[str, Any]:
    """What bit-identity is conditional on: build, instruction set or GPU model, threads, kernel settings."""
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
    """The processor's model name, as the kernel tells it."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

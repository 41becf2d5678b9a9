"""Deterministic kernels: torch's switches that decide which of several algorithms runs."""

from __future__ import annotations

import os

import torch


def make_deterministic() -> None:
    """Choose deterministic kernels and full float32 products; called once per process before any CUDA work."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Otherwise torch fills every new tensor with NaN first, to help programs that read memory they never wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False

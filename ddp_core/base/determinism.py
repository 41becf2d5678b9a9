"""Which kernels torch runs and in how many threads: what decides, beside the program, the last bits of a result."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import torch


def choose_kernels(deterministic: bool = True, tf32: bool = False) -> None:
    """Choose deterministic kernels or else the fastest, and float32 products in full or in TF32."""
    # Called once per run before any CUDA work. On the CPU the choice of kernels matters with several threads only, and
    # TF32 does not exist. Without `deterministic` cuDNN tries its algorithms on every new shape and keeps the fastest.
    if deterministic:
        # Without this cuBLAS may add in another order where several streams multiply at the same time; torch refuses
        # deterministic products without it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(deterministic)
    # Otherwise torch fills every new tensor with NaN first, to help programs that read memory they never wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = not deterministic
    # Not by the newer `fp32_precision`: where that says tf32, reading `allow_tf32` raises, and torch.compile reads it.
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32


def has_tf32(device: torch.device) -> bool:
    """Whether this device multiplies in TF32 where that is chosen: GPUs of compute capability 8.0 or higher do."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def use_chosen_threads() -> None:
    """Compute in as many threads as the variable OMP_NUM_THREADS says; in one thread where it is not set."""
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))


def use_one_thread() -> None:
    """Compute in one thread: for a process that forks others, until it calls `use_chosen_threads`."""
    # OpenMP waits for ever in the fork of a process in which it has run several threads.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


def one_thread(name: str, device: torch.device | None = None) -> ThreadPoolExecutor:
    """A pool with a single Python thread, which works on `device` where that is a CUDA device."""
    # OpenMP's number of threads and the current CUDA device belong to each Python thread. The new thread takes over the
    # first from the thread that calls this, and sets the second.
    count = torch.get_num_threads()

    def begin() -> None:
        torch.set_num_threads(count)
        if device is not None and device.type == "cuda":
            torch.cuda.set_device(device)

    return ThreadPoolExecutor(1, name, initializer=begin)

"""How many threads compute: as many as somebody chose, and in each new thread as in the thread that makes it."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import torch


def use_chosen_threads() -> None:
    """Compute in as many threads as OMP_NUM_THREADS says; in one where it says nothing."""
    torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))


def one_thread(name: str, device: torch.device | None = None) -> ThreadPoolExecutor:
    """A single thread, in the pool that feeds it; it works on `device` where that is a CUDA device.

    OpenMP's number of threads and the current CUDA device belong to each Python thread, so every new thread sets both.
    """
    return ThreadPoolExecutor(1, name, initializer=_begin, initargs=(device, torch.get_num_threads()))


def _begin(device: torch.device | None, threads: int) -> None:
    torch.set_num_threads(threads)
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)

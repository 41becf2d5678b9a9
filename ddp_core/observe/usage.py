"""What a rank uses of its machine: memory, cores, and how busy it keeps its CUDA device."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from statistics import fmean
from typing import TypedDict

import torch


class Totals(TypedDict):
    """What one rank or all ranks used.

    Bytes at the peak of memory; cores kept busy (1.0: one core all the time); and the share of time in which kernels
    ran on the CUDA device (None without a CUDA device or without NVML).
    """

    peak_memory_bytes: int
    cpu_utilisation: float
    gpu_utilisation: float | None


class Usage:
    """One rank's usage, counted from its creation or from the last `restart`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asks_driver = device.type == "cuda"
        self._shares: list[float] = []
        self.restart()

    def restart(self) -> None:
        """Count from now on; the peak of memory is kept."""
        self._began, self._processor = time.perf_counter(), time.process_time()
        self._shares.clear()

    def sample(self) -> None:
        """Ask the driver how busy the device has been (torch.cuda.utilization); once a second is often enough."""
        if not self._asks_driver:
            return
        try:
            self._shares.append(torch.cuda.utilization(self._device) / 100)
        except Exception:  # nvidia-ml-py is missing, or the driver raises an error of its own type
            self._asks_driver = False

    def totals(self) -> Totals:
        """What has been used until now."""
        seconds = time.perf_counter() - self._began
        return {
            "peak_memory_bytes": _peak_memory(self._device),
            "cpu_utilisation": (time.process_time() - self._processor) / seconds,
            "gpu_utilisation": fmean(self._shares) if self._shares else None,
        }


def of_all(parts: list[Totals]) -> Totals:
    """The usage of several ranks: the largest peak of memory, and the mean of each other figure."""
    busy = [part["gpu_utilisation"] for part in parts if part["gpu_utilisation"] is not None]
    return {
        "peak_memory_bytes": max(part["peak_memory_bytes"] for part in parts),
        "cpu_utilisation": fmean(part["cpu_utilisation"] for part in parts),
        "gpu_utilisation": fmean(busy) if busy else None,
    }


def _peak_memory(device: torch.device) -> int:
    """Peak bytes: of the device's allocations on CUDA, else of the process's resident memory.

    Resident pages that several processes share (the libraries of workers forked from one process) are divided among
    these processes.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return peak - _held_by_others()


def _held_by_others() -> int:
    """Resident bytes that other processes account for: resident less proportional set size (proc(5), smaps_rollup)."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines[1:])}
        return sizes["Rss"] - sizes["Pss"]
    except (OSError, KeyError, ValueError):
        return 0

"""What a rank takes of its machine: memory, cores, and how busy it keeps its CUDA device."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from statistics import fmean
from typing import TypedDict

import torch


class Totals(TypedDict):
    """Bytes at the peak; cores kept busy (1.0: one core all the time); the share of time in which kernels ran on the
    CUDA device, None without one or without NVML.
    """

    peak_memory_bytes: int
    cpu_utilisation: float
    gpu_utilisation: float | None


class Usage:
    """One rank's, from its start or the last `restart` on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asks_driver = device.type == "cuda"
        self._shares: list[float] = []
        self.restart()

    def restart(self) -> None:
        """Count from now on; a peak of memory stays."""
        self._began, self._processor = time.perf_counter(), time.process_time()
        self._shares.clear()

    def sample(self) -> None:
        """Ask the driver how busy the device was of late (torch.cuda.utilization); once a second is often enough."""
        if not self._asks_driver:
            return
        try:
            self._shares.append(torch.cuda.utilization(self._device) / 100)
        except Exception:  # nvidia-ml-py is missing, or the driver does not tell: errors of its own kinds
            self._asks_driver = False

    def totals(self) -> Totals:
        """So far."""
        seconds = time.perf_counter() - self._began
        return {
            "peak_memory_bytes": _peak_memory(self._device),
            "cpu_utilisation": (time.process_time() - self._processor) / seconds,
            "gpu_utilisation": fmean(self._shares) if self._shares else None,
        }


def of_all(parts: list[Totals]) -> Totals:
    """What is said of several ranks: the memory of the one that needed most, the mean of the others' figures."""
    busy = [part["gpu_utilisation"] for part in parts if part["gpu_utilisation"] is not None]
    return {
        "peak_memory_bytes": max(part["peak_memory_bytes"] for part in parts),
        "cpu_utilisation": fmean(part["cpu_utilisation"] for part in parts),
        "gpu_utilisation": fmean(busy) if busy else None,
    }


def _peak_memory(device: torch.device) -> int:
    """Bytes: the device's peak allocation on CUDA, else the process's peak resident size, with pages that processes
    share (the libraries of workers forked from one nursery) divided among them.
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

"""What a rank uses of its machine: memory, cores, its CUDA device; and what other programs use meanwhile."""

from __future__ import annotations

import contextlib
import resource
import time
from pathlib import Path
from statistics import fmean
from typing import TypedDict

import psutil
import torch

from ddp_core.base.platforms import RSS_UNIT, boot_id

_FIRST_STEPS = 2


class _Used(TypedDict):
    """What a rank used, or all ranks."""

    memory_at_start_bytes: int
    """When counting began."""
    step_memory_bytes: int
    """The peak of the first steps."""
    peak_memory_bytes: int
    """The peak of all steps, evaluations and saves."""
    device_free_bytes: int | None
    """What neither this process nor another one holds of the CUDA device, at last; None without one."""
    cpu_utilisation: float
    """Cores that the process kept busy: 1.0 is one core all the time."""
    gpu_utilisation: float | None
    """Share of the time in which kernels ran on the CUDA device; None without a CUDA device or without NVML."""


class RankTotals(_Used):
    """What one rank used, and how busy its machine was."""

    machine: str
    """A name that containers on one machine share, and no other machine has."""
    machine_cores_busy: float
    """Cores that all programs together kept busy on the machine."""
    own_cores_busy: float
    """Cores that this process and its descendants kept busy."""


class Totals(_Used):
    """What all ranks used."""

    other_cores_busy: float
    """Cores that other programs kept busy, on the machine where these were most."""


class Usage:
    """One rank's usage, counted from its `start`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._asks_driver = device.type == "cuda"
        self._shares: list[float] = []
        self._step_memory, self._steps = 0, 0
        self._has_started = False

    def start(self) -> None:
        """Count from now on; does nothing where that has begun already, in an earlier group of a live recovery."""
        if self._has_started:
            return
        self._has_started = True
        if self._device.type == "cuda":
            self._memory_at_start = torch.cuda.memory_allocated(self._device)
        else:
            self._memory_at_start = psutil.Process().memory_info().rss - _held_by_others()
        self._began, self._processor = time.perf_counter(), time.process_time()
        self._machine_seconds, self._own_seconds = _processor_seconds()
        self._shares.clear()

    def sample(self) -> None:
        """Ask the driver how busy the device has been (torch.cuda.utilization); once a second is often enough."""
        if not self._asks_driver:
            return
        try:
            self._shares.append(torch.cuda.utilization(self._device) / 100)
        except Exception:  # nvidia-ml-py is missing, or the driver raises an error of its own type
            self._asks_driver = False

    def step_done(self) -> None:
        """Note the peak of memory after the first steps: later, evaluations and saves have their part in it."""
        # The second step has what the first one's update makes, the optimizer's state.
        self._steps += 1
        if self._steps <= _FIRST_STEPS:
            self._step_memory = max(self._memory_at_start, _peak_memory(self._device))

    def totals(self) -> RankTotals:
        """What has been used until now."""
        seconds = time.perf_counter() - self._began
        machine_seconds, own_seconds = _processor_seconds()
        return {
            "memory_at_start_bytes": self._memory_at_start,
            "step_memory_bytes": self._step_memory,
            # Pages that other processes share are not counted, and may be more by now than after the first steps.
            "peak_memory_bytes": max(self._step_memory, _peak_memory(self._device)),
            "device_free_bytes": torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else None,
            "cpu_utilisation": (time.process_time() - self._processor) / seconds,
            "gpu_utilisation": fmean(self._shares) if self._shares else None,
            "machine": boot_id(),
            "machine_cores_busy": (machine_seconds - self._machine_seconds) / seconds,
            "own_cores_busy": (own_seconds - self._own_seconds) / seconds,
        }


def of_all(parts: list[RankTotals]) -> Totals:
    """The usage of all ranks: the most memory, the mean of each share, and the cores that other programs kept busy."""
    free = [part["device_free_bytes"] for part in parts if part["device_free_bytes"] is not None]
    busy = [part["gpu_utilisation"] for part in parts if part["gpu_utilisation"] is not None]
    machines = {part["machine"]: [other for other in parts if other["machine"] == part["machine"]] for part in parts}
    others = [
        max(rank["machine_cores_busy"] for rank in ranks) - sum(rank["own_cores_busy"] for rank in ranks)
        for ranks in machines.values()
    ]
    return {
        "memory_at_start_bytes": max(part["memory_at_start_bytes"] for part in parts),
        "step_memory_bytes": max(part["step_memory_bytes"] for part in parts),
        "peak_memory_bytes": max(part["peak_memory_bytes"] for part in parts),
        "device_free_bytes": min(free, default=None),
        "cpu_utilisation": fmean(part["cpu_utilisation"] for part in parts),
        "gpu_utilisation": fmean(busy) if busy else None,
        "other_cores_busy": max(0.0, *others),
    }


def _processor_seconds() -> tuple[float, float]:
    """Processor time of everything on this machine, and of this process with its descendants, living or ended."""
    # The machine's has also the time that its hypervisor gave to other machines.
    times: dict[str, float] = psutil.cpu_times()._asdict()
    # Linux counts the time of guests as user time, too.
    machine = sum(seconds for part, seconds in times.items() if part not in ("idle", "iowait", "guest", "guest_nice"))
    this, own = psutil.Process(), 0.0
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            own += sum(process.cpu_times()[:4])
    return machine, own


def _peak_memory(device: torch.device) -> int:
    """Peak bytes: of the device's allocations on CUDA, else of the process's resident memory."""
    # Resident pages that several processes share (the libraries of workers forked from one process) are divided among
    # these processes.
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT - _held_by_others()


def _held_by_others() -> int:
    """Resident bytes that other processes account for: resident less proportional set size (proc(5), smaps_rollup)."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines[1:])}
        return sizes["Rss"] - sizes["Pss"]
    except (OSError, KeyError, ValueError):
        return 0

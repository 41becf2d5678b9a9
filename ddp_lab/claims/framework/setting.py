"""Where and how thoroughly claims are measured."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def _say_nothing(text: str) -> None:
    pass


@dataclass(frozen=True)
class Setting:
    """How thoroughly to measure, where files go, and what devices there are.

    On CPU a device is a core: a rank or replica uses one thread, and more of them than cores only take turns.
    """

    quick: bool
    output: Path
    cores: int
    cuda_devices: int = 0
    say: Callable[[str], None] = field(default=_say_nothing, repr=False)

    @classmethod
    def here(cls, quick: bool, output: Path, say: Callable[[str], None] = _say_nothing) -> Setting:
        """The setting that this machine gives."""
        import torch

        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return cls(quick, output, usable_cores(), devices, say)

    def device_type(self, count: int) -> str:
        """What `count` ranks or replicas run on: cuda where each has a device of its own, else cpu."""
        return "cuda" if 0 < count <= self.cuda_devices else "cpu"

    @property
    def devices(self) -> int:
        """How many ranks can work at the same time: CUDA devices where there are two or more, else cores."""
        return self.cuda_devices if self.cuda_devices > 1 else self.cores

    @property
    def ranks(self) -> int:
        """The most of 2, 4 and 8 ranks that can work at the same time; 0 where no two can."""
        return max((count for count in (2, 4, 8) if count <= self.devices), default=0)

    @property
    def claims(self) -> Path:
        """Where the claims' files go."""
        return self.output / "claims"

    def runs(self, claim: str) -> Path:
        """Where the run directories of a claim go."""
        return self.claims / "runs" / claim

    def describe(self) -> dict[str, Any]:
        """What a claim's file says about the setting."""
        return {"quick": self.quick, "cores": self.cores, "cuda_devices": self.cuda_devices}


def usable_cores() -> int:
    """Physical cores that this process may use: its affinity and its container's quota considered."""
    import psutil

    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    count = min(allowed, psutil.cpu_count(logical=False) or allowed)
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists():
        limit, _, period = quota.read_text().strip().partition(" ")
        if limit.isdigit() and period.isdigit():
            count = min(count, max(1, int(limit) // int(period)))
    return max(1, count)

"""Whether the memory of a CUDA device runs out, where a library silently goes on with a kernel that needs less."""

from __future__ import annotations

import torch

from ddp_core.base.errors import ExitCode
from ddp_core.distributed.process_group import Collectives
from ddp_core.trainers.job import Finding


class DeviceMemory:
    """Watches torch's allocator, whose counts tell of a lack that cuDNN has met and said nothing of.

    cuDNN's next plan after one that finds no workspace has other bits (aten/src/ATen/native/cudnn/Conv_v8.cpp). On
    a GPU this has run, and has met no lack.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._has_warned = False
        self._before = self._counts()

    def require_enough(self, step: int) -> str | None:
        """A warning, once, where some rank's memory is nearly full; a collective.

        Raises Finding (4), on every rank, where it ran out and training went on all the same.
        """
        ours = [now - before for now, before in zip(self._counts(), self._before, strict=True)]
        everyones = self._collectives.gather((self._collectives.world.place, *ours))
        for place, _, failed in everyones:
            if failed:
                raise Finding(
                    f"{place}: the device's memory ran out up to step {step}, and something went on with less, such as "
                    "cuDNN with another kernel, whose bits are others; use a smaller --set micro_batch=N, or end what "
                    "else is on the device",
                    ExitCode.RESOURCES,
                )
        short = [place for place, emptied, _ in everyones if emptied]
        if not short or self._has_warned:
            return None
        self._has_warned = True
        return (
            f"warning: {short[0]}: the device's memory is nearly full, torch had to give back what it kept; with a "
            "little less, cuDNN takes other kernels and the run ends"
        )

    def _counts(self) -> tuple[int, int]:
        """How often torch gave back what it had kept, to find room, and how often that was not enough."""
        found = torch.cuda.memory_stats(self._collectives.device)
        return found.get("num_alloc_retries", 0), found.get("num_ooms", 0)

"""Data sets in two parts: what the host fetches, and what the training device makes of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_core.data.trees import Tree
from ddp_core.sampler import Ids


class Staged(ABC):
    """A data set that fetches a micro-batch as it is stored, and finishes it on the device that trains.

    Images stored as bytes then travel to a GPU as bytes, a quarter of their float32, and the host only copies rows.
    Subclasses have `__len__` and `__getitem__`, too, which gives one finished sample.
    """

    @abstractmethod
    def gather(self, ids: Ids | Sequence[int], pin_memory: bool = False) -> tuple[Any, Any]:
        """Inputs and targets of the samples `ids` as they are stored: two trees of CPU tensors [n, …] of their own.

        `pin_memory`: they may be put into pinned memory at once; tensors that are not are copied there later.
        """

    def finish(self, inputs: Tree) -> Tree:
        """The inputs that the model gets, on the device of what `gather` gave as `inputs`, each sample by itself."""
        return inputs


class Standardise:
    """Makes float32 of bytes: (pixel - 255 * mean) / (255 * deviation), channel by channel, on the pixels' device.

    Images are uint8 [n, channels, height, width] or [channels, height, width].
    """

    def __init__(self, mean: Sequence[float], deviation: Sequence[float]) -> None:
        offset = torch.tensor(mean).mul(255).view(-1, 1, 1)
        factor = torch.tensor(deviation).mul(255).reciprocal().view(-1, 1, 1)
        self._constants = {offset.device: (offset, factor)}

    def __call__(self, images: Tensor) -> Tensor:
        device = images.device
        if device not in self._constants:
            offset, factor = self._constants[torch.device("cpu")]
            # The host waits for these two copies, once, so that every stream finds them done.
            self._constants[device] = offset.to(device), factor.to(device)
        offset, factor = self._constants[device]
        return images.float().sub_(offset).mul_(factor)

"""The tag that says on which device a tensor lies: it belongs to the memory, so views and `.data` share it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.standin_cuda.world import WORLD

CPU = torch.device("cpu")
_plain_device: Any = torch._C.StorageBase.__dict__["device"]
_TAG, _PINNED = "stand_in_device", "stand_in_pinned"


class _Allocation:
    """Counts the memory of a device while it lives, which is as long as the memory does."""

    def __init__(self, device: torch.device, size: int) -> None:
        WORLD.allocate(device.index, size)
        self.device, self._size = device, size

    def __del__(self) -> None:
        if hasattr(self, "_size"):
            WORLD.free(self.device.index, self._size)


def memory_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """None for tensors without any, such as sparse ones and those within torch.func."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def of_memory(memory: Any) -> torch.device | None:
    allocation = vars(memory).get(_TAG)
    return None if allocation is None else allocation.device


def device_of(tensor: Tensor) -> torch.device | None:
    """The CUDA device of a tensor; None for one that is not on CUDA."""
    inner = getattr(tensor, "_local_tensor", None)  # a DTensor
    memory = memory_of(tensor if inner is None else inner)
    return None if memory is None else of_memory(memory)


def is_tagged(tensor: Tensor) -> bool:
    return device_of(tensor) is not None


def tag_memory(memory: Any, device: torch.device | None, size: int | None = None) -> None:
    if device is None or device.type != "cuda":
        vars(memory).pop(_TAG, None)
    elif of_memory(memory) != device and _plain_device.__get__(memory).type == "cpu":
        WORLD.refuse_bad_fork()
        vars(memory)[_TAG] = _Allocation(device, memory.nbytes() if size is None else size)


def tag(tensor: Tensor, device: torch.device | None) -> Tensor:
    """Put the tensor's memory on the device; None or the CPU takes it off."""
    memory = memory_of(tensor)
    if memory is not None:
        tag_memory(memory, device)
    return tensor


def pin(tensor: Tensor) -> Tensor:
    vars(tensor.untyped_storage())[_PINNED] = True
    return tensor


def is_pinned(tensor: Tensor) -> bool:
    memory = memory_of(tensor)
    return memory is not None and vars(memory).get(_PINNED, False)

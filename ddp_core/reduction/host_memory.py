"""Tensors of a device, copied to host memory and back: gloo sends and receives by address, and knows host memory only.

So several ranks can share a GPU over gloo. What a sum is given is copied to the host, sent and added up there, and the
sum is copied back. An addition of two numbers has the same bits on the host and on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Complete copies in host memory: gloo reads them at their address, without waiting for a stream."""
    copies = [like_on_host(tensor).copy_(tensor, non_blocking=True) for tensor in tensors]
    if tensors and tensors[0].is_cuda:
        # This thread alone waits, and only for what its own stream was given.
        torch.cuda.current_stream(tensors[0].device).record_event().synchronize()
    return copies


def like_on_host(tensor: Tensor) -> Tensor:
    """Memory on the host for values of the tensor."""
    # Pinned memory is costly to get, so torch keeps it and gives it out again when no copy uses it any more.
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)

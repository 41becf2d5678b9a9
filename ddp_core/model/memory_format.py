"""Where the elements of images and of their filters lie in memory: channel after channel, or with channels innermost.

With channels innermost, convolutions in half precision are about twice as fast on a GPU, because its tensor cores read
them so. They are made by other kernels, which give other bits. Only the strides of a tensor change: its shape, the
meaning of an index, checkpoints and digests stay as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddp_core.config.records import MemoryFormat

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By number of dimensions: 4 of images (samples, channels, height, width), 5 of volumes and films."""


def laid_out(tensor: Tensor, memory_format: MemoryFormat) -> Tensor:
    """The tensor in this format; as it is for `contiguous`, or if it has not 4 or 5 dimensions."""
    wanted = _CHANNELS_LAST.get(tensor.dim()) if memory_format == "channels_last" else None
    return tensor if wanted is None else tensor.contiguous(memory_format=wanted)


def lay_out(model: nn.Module, memory_format: MemoryFormat) -> nn.Module:
    """Give the model's parameters this format, in place; returns the model. The parameters stay the same objects."""
    for parameter in model.parameters():
        parameter.data = laid_out(parameter.data, memory_format)
    return model


def same_layout(tensor: Tensor, other: Tensor) -> bool:
    """Whether equal indices lie at equal places in the memory of two tensors of one shape."""
    strides = zip(tensor.shape, tensor.stride(), other.stride(), strict=True)
    # The stride of a dimension with one element means nothing.
    return all(ours == theirs for size, ours, theirs in strides if size > 1)


def fills_its_memory(tensor: Tensor) -> bool:
    """Whether the elements lie without gaps or overlaps, whichever of the dimensions is innermost."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != reach:
                return False
            reach *= size
    return True

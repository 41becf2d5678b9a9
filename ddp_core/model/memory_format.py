"""Where the elements of images and of their filters lie in memory: channel after channel, or with channels innermost.

Convolutions in half precision are about twice as fast on a GPU's tensor cores with channels innermost, because that is
how these read them: other kernels, which give other bits. Only the strides of a tensor change. Its shape, what an index
means, checkpoints and digests stay as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddp_core.config.records import MemoryFormat

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By number of dimensions: images (samples, channels, height, width), and volumes or films."""


def laid_out(tensor: Tensor, memory_format: MemoryFormat) -> Tensor:
    """The same values in this format; a tensor that has no channels, or any with `contiguous`, is returned as it is."""
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
    # Of a dimension with one element the stride means nothing.
    return all(ours == theirs for size, ours, theirs in strides if size > 1)


def fills_its_memory(tensor: Tensor) -> bool:
    """Whether the elements lie side by side, without gaps or overlaps, in whatever sequence of the dimensions."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != reach:
                return False
            reach *= size
    return True

"""Models by name: functions with keyword options that return a module, its weights drawn from torch's generator.

Also where the elements of images and of their filters lie in memory. With channels innermost, convolutions in half
precision are about twice as fast on a GPU, because its tensor cores read them so. They are made by other kernels, which
give other bits. Only the strides of a tensor change: its shape, the meaning of an index, checkpoints and digests stay
as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from ddp_core.base.errors import UserError
from ddp_core.base.extras import Functions, require
from ddp_core.config.records import MemoryFormat

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By number of dimensions: 4 of images (samples, channels, height, width), 5 of volumes and films."""


def linear(features: int = 1, outputs: int = 1) -> nn.Module:
    """One linear layer: [n, features] -> [n, outputs]."""
    return nn.Linear(features, outputs)


class SigmoidClassifier(nn.Module):
    """A linear layer and a sigmoid, [n, features] -> [n, 1]; the buffer `cnt` counts the forwards of this replica."""

    cnt: Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.fc = nn.Linear(features, 1)
        self.register_buffer("cnt", torch.tensor(0))

    def forward(self, inputs: Tensor) -> Tensor:
        self.cnt += 1
        return torch.sigmoid(self.fc(inputs))


def sigmoid_classifier(features: int = 10) -> nn.Module:
    """A classifier with a buffer that shows what DDP broadcasts: [n, features] -> probabilities [n, 1]."""
    return SigmoidClassifier(features)


def mlp(sizes: Sequence[int] = (64, 64, 10), dropout: float = 0.0) -> nn.Module:
    """Linear layers of these sizes, with ReLU (and dropout if it is not 0) between them; inputs are flattened."""
    if len(sizes) < 2:
        raise UserError(f"model mlp needs at least two sizes, inputs and outputs, not {list(sizes)}")
    layers: list[nn.Module] = [nn.Flatten()]
    for index, (inputs, outputs) in enumerate(pairwise(sizes)):
        if index:
            layers.append(nn.ReLU())
            if dropout:
                layers.append(nn.Dropout(dropout))
        layers.append(nn.Linear(inputs, outputs))
    return nn.Sequential(*layers)


def two_layer() -> nn.Module:
    """Ten inputs, five hidden units with ReLU, one output: [n, 10] -> [n, 1]."""
    return mlp((10, 5, 1))


def small_cnn(
    width: int = 16, dropout: float = 0.25, image_size: int = 8, channels: int = 1, classes: int = 10
) -> nn.Module:
    """Three 3x3 convolutions with BatchNorm, two poolings, dropout and one linear layer.

    [n, channels, image_size, image_size] -> logits [n, classes]. Raises UserError for an `image_size` below 4.
    """
    if image_size < 4:
        raise UserError(f"model small_cnn halves its images twice: image_size {image_size} must be at least 4")

    def convolution(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *convolution(channels, width),
        *convolution(width, 2 * width),
        nn.MaxPool2d(2),
        *convolution(2 * width, 2 * width),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(2 * width * (image_size // 4) ** 2, classes),
    )


def resnet18(classes: int = 10, small_input: bool = False, compiled: bool = False) -> nn.Module:
    """torchvision's ResNet-18 without pretrained weights: [n, 3, size, size] -> logits [n, classes].

    `small_input` makes the first convolution 3x3 with stride 1 and leaves out the pooling after it, as the original
    paper (He et al. 2015, section 4.2) does for 32x32 images. `compiled` has torch.compile join the layers' work into
    fewer kernels, which are faster on a GPU and have other bits.
    """
    from ddp_core.base.torchvision_import import import_torchvision

    require("resnet18", "vision")
    model: nn.Module = import_torchvision("models").resnet18(weights=None, num_classes=classes)
    if small_input:
        model.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
        model.maxpool = nn.Identity()
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    if compiled:
        model.compile()
    return model


MODELS: Mapping[str, Callable[..., nn.Module]] = Functions(
    linear=linear,
    sigmoid_classifier=sigmoid_classifier,
    two_layer=two_layer,
    mlp=mlp,
    small_cnn=small_cnn,
    resnet18=resnet18,
    transformer="ddp_core.model.transformer",
)


def laid_out(tensor: Tensor, memory_format: MemoryFormat) -> Tensor:
    """The tensor in this format; as it is for `contiguous`, or if it has not 4 or 5 dimensions."""
    wanted = _CHANNELS_LAST.get(tensor.dim()) if memory_format == "channels_last" else None
    return tensor if wanted is None else tensor.contiguous(memory_format=wanted)


def lay_out(model: nn.Module, memory_format: MemoryFormat) -> nn.Module:
    """Give the model's parameters this format, in place; returns the model. The parameters stay the same objects."""
    for parameter in model.parameters():
        parameter.data = laid_out(parameter.data, memory_format)
    return model

"""Does a model of torchvision or timm end with the same bits on every layout?

Its weights are drawn, nothing is fetched. Images are noise, and just large enough for the model.
"""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ddp_core import Experiment, InMemory, Splits
from ddp_core.base.torchvision_import import import_torchvision

CLASSES, SAMPLES = 10, 12


def model(library: str = "torchvision", architecture: str = "resnet18", size: int = 32, told: str = "") -> nn.Module:
    """`told`: the option by which the model is told the size of its images, where it has one."""
    models: Any = import_torchvision()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of weights that will be drawn in another way some day
        if library == "torchvision":
            said: Any = (size, size) if told == "input_size" else size
            made = models.get_model(architecture, weights=None, num_classes=CLASSES, **({told: said} if told else {}))
        else:
            import timm

            made = timm.create_model(architecture, num_classes=CLASSES, **({told: size} if told else {}))
    return made  # type: ignore[no-any-return]


def data(size: int = 32) -> Splits:
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(SAMPLES, 3, size, size, generator=draw)
    return Splits(InMemory(images, torch.randint(0, CLASSES, (SAMPLES,), generator=draw)), None)


def loss(outputs: Any, targets: Tensor) -> Tensor:
    # GoogLeNet and Inception also give what their auxiliary classifiers say.
    every = outputs if isinstance(outputs, tuple) else (outputs,)
    parts = [nn.functional.cross_entropy(each, targets, reduction="sum") for each in every if each is not None]
    return torch.stack(parts).sum()


def optimizer(model: nn.Module, lr: float = 0.001) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


experiment = Experiment(
    name="foreign_images",
    global_batch_size=6,
    micro_batch=2,
    clip_norm=1.0,  # two images of few pixels let a deep network's batch normalisation make any gradient
)

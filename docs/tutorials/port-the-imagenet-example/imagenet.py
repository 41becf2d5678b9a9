"""pytorch's imagenet example as an experiment: a network of torchvision on folders of pictures, train and val."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torchvision import datasets, models, transforms

from ddp_core import Component, Experiment, Optimizer, Splits


def data(root: Path, folder: str = "imagenet", size: int = 224) -> Splits:
    normalize = transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    training = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    testing = [transforms.Resize(size * 8 // 7), transforms.CenterCrop(size)]
    train, val = (
        datasets.ImageFolder(root / folder / part, transforms.Compose([*changes, transforms.ToTensor(), normalize]))
        for part, changes in (("train", training), ("val", testing))
    )
    return Splits(train, val, files=[Path(path) for path, _ in train.samples + val.samples])


def model(arch: str = "resnet18", classes: int = 1000) -> nn.Module:
    network: nn.Module = models.get_model(arch, num_classes=classes)
    return network


def schedule(
    optimizer: torch.optim.Optimizer, steps_per_epoch: int, epochs: int = 30
) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=epochs * steps_per_epoch, gamma=0.1)


def metrics(outputs: Tensor, targets: Tensor) -> dict[str, tuple[Tensor, int]]:
    best = outputs.topk(min(5, outputs.shape[1]), dim=1).indices
    return {"top_5": ((best == targets[:, None]).any(1).sum(), len(targets))}


experiment = Experiment(
    name="imagenet",
    optimizer=Optimizer(name="sgd", lr=0.1, momentum=0.9, weight_decay=1e-4),
    schedule=Component(name="schedule"),
    global_batch_size=256,
    micro_batch=32,
    epochs=90,
)

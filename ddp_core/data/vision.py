"""Image data sets that torchvision downloads, checks and reads: downloads happen on request, never during training."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from urllib.error import URLError

import torch
from torch import Tensor

from ddp_core.base.errors import UserError, nearest_name
from ddp_core.base.refusals import is_lack, refused
from ddp_core.base.torchvision_import import import_torchvision
from ddp_core.data.augment import shift_and_flip
from ddp_core.data.splits import ByteImages, Splits, content_digest

_CLASSES = {"cifar10": "CIFAR10", "fashion_mnist": "FashionMNIST"}
"""By the name of a data set its class in torchvision.datasets."""
_SILENT_SECONDS = 20


def fashion_mnist(root: Path, augment: bool = True) -> Splits:
    """70,000 pictures of clothes, 10,000 of them held out: inputs float32 [1, 28, 28], standardised, targets 0..9.

    Reads `root/FashionMNIST/raw`. `augment`: random crop with a padding of 2, horizontal flip. Source: Xiao, Rasul,
    Vollgraf (2017). Raises UserError with the fetching command where files are missing or damaged.
    """
    return _splits("fashion_mnist", root, mean=(0.2860,), deviation=(0.3530,), padding=2 if augment else None)


def cifar10(root: Path, augment: bool = True) -> Splits:
    """60,000 photographs, 10,000 of them held out: inputs float32 [3, 32, 32], standardised, targets 0..9.

    Reads `root/cifar-10-batches-py`. `augment`: random crop with a padding of 4, horizontal flip. Source: Krizhevsky
    (2009). Raises UserError with the fetching command where files are missing or damaged.
    """
    mean, deviation = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    return _splits("cifar10", root, mean, deviation, padding=4 if augment else None)


def fetch_data_set(name: str, root: Path, report: Callable[[str], object] = print) -> None:
    """Bring a data set into `root`, ready for training; what is there and whole is not fetched again.

    Raises UserError: (2) for an unknown name, no network or wrong content; (4) where `root` cannot be written.
    """
    if name not in _CLASSES:
        raise UserError(
            f"no data set {name} to fetch (those that come with the package are there already); "
            f"{nearest_name(name, _CLASSES)}"
        )
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_SILENT_SECONDS)  # torchvision gives none, and would wait for a silent server without end
    try:
        for train in (True, False):
            getattr(import_torchvision("datasets"), _CLASSES[name])(root, train=train, download=True)
    except Exception as error:  # a damaged file can raise anything
        if is_lack(error) or (isinstance(error, OSError) and not isinstance(error, URLError) and error.filename):
            raise refused(error, root) from None
        raise UserError(
            f"could not fetch {name}: {_in_words(error)}; check the network, remove what is damaged in "
            f"{root}, and run again: {_fetching(name, root)}"
        ) from None
    finally:
        socket.setdefaulttimeout(before)
    report(f"{name} is ready in {root}")


def _splits(
    name: str, root: Path, mean: tuple[float, ...], deviation: tuple[float, ...], padding: int | None
) -> Splits:
    halves, parts = [], list[Tensor]()
    try:
        for train in (True, False):
            read = getattr(import_torchvision("datasets"), _CLASSES[name])(root, train=train)
            images, labels = torch.as_tensor(read.data), torch.as_tensor(read.targets)
            # [n, height, width], or with colours as the last dimension.
            images = (images.unsqueeze(1) if images.dim() == 3 else images.permute(0, 3, 1, 2)).contiguous()
            halves.append(ByteImages(images, labels, mean, deviation))
            parts += [images, labels]
    except Exception as error:  # a damaged file can raise anything
        if is_lack(error):
            raise
        raise UserError(
            f"data set {name} cannot be read in {root} ({_in_words(error)}); fetch it first: "
            f"{_fetching(name, root)}, or name the folder that holds it with --data-dir DIR"
        ) from None
    return Splits(
        train=halves[0],
        test=halves[1],
        classes=10,
        augmentation=None if padding is None else shift_and_flip(padding, flip=True),
        digest=content_digest(*parts),
    )


def _in_words(error: Exception) -> str:
    return " ".join(str(error).split()).partition(". You can use download=True")[0] or type(error).__name__


def _fetching(name: str, root: Path) -> str:
    return f"ddp data fetch {name} --data-dir {root}"

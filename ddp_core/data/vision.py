"""Image data sets in torchvision's layout on disk, read without torchvision, whose import costs a second per rank.

They are fetched beforehand (`ddp_core.data.fetch`); a missing or damaged file is an error that names the command.
"""

from __future__ import annotations

import io
import pickle
import struct
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.data.augment import shift_and_flip
from ddp_core.data.splits import ByteImages, Splits, content_digest

_CLASSES = 10


def fashion_mnist(root: Path, augment: bool = True) -> Splits:
    """70,000 pictures of clothes, 10,000 of them held out: inputs float32 [1, 28, 28], standardised, targets 0..9.

    Reads `root/FashionMNIST/raw`. `augment`: random crop with a padding of 2, horizontal flip. Source: Xiao, Rasul,
    Vollgraf (2017). Raises UserError with the fetching command where files are missing or damaged.
    """
    folder = root / "FashionMNIST" / "raw"
    parts = []
    for split in ("train", "t10k"):
        images = _read_idx(folder / f"{split}-images-idx3-ubyte", 3, "fashion_mnist", root)
        labels = _read_idx(folder / f"{split}-labels-idx1-ubyte", 1, "fashion_mnist", root)
        parts += _checked(images[:, None], labels, "fashion_mnist", folder, root)
    return _splits(parts, mean=(0.2860,), deviation=(0.3530,), padding=2 if augment else None)


def cifar10(root: Path, augment: bool = True) -> Splits:
    """60,000 photographs, 10,000 of them held out: inputs float32 [3, 32, 32], standardised, targets 0..9.

    Reads `root/cifar-10-batches-py`. `augment`: random crop with a padding of 4, horizontal flip. Source: Krizhevsky
    (2009). Raises UserError with the fetching command where files are missing or damaged.
    """
    folder = root / "cifar-10-batches-py"
    train = [_read_cifar(folder / f"data_batch_{number}", root) for number in range(1, 6)]
    test = _read_cifar(folder / "test_batch", root)
    images, labels = (np.concatenate(column) for column in zip(*train, strict=True))
    parts = _checked(images, labels, "cifar10", folder, root) + _checked(*test, "cifar10", folder, root)
    return _splits(
        parts, mean=(0.4914, 0.4822, 0.4465), deviation=(0.2470, 0.2435, 0.2616), padding=4 if augment else None
    )


def _splits(parts: list[Tensor], mean: tuple[float, ...], deviation: tuple[float, ...], padding: int | None) -> Splits:
    """Make splits of [training images, training labels, test images, test labels]."""
    return Splits(
        train=ByteImages(parts[0], parts[1], mean, deviation),
        test=ByteImages(parts[2], parts[3], mean, deviation),
        classes=_CLASSES,
        augmentation=None if padding is None else shift_and_flip(padding, flip=True),
        digest=content_digest(*parts),
    )


def _checked(images: NDArray[np.uint8], labels: NDArray[Any], name: str, folder: Path, root: Path) -> list[Tensor]:
    """Images and labels as tensors. Raises UserError where they do not fit together."""
    if len(images) != len(labels):
        _unusable(name, folder, f"{len(images)} images but {len(labels)} labels", root)
    if len(labels) == 0 or int(labels.min()) < 0 or int(labels.max()) >= _CLASSES:
        _unusable(name, folder, f"labels are not numbers from 0 to {_CLASSES - 1}", root)
    return [torch.from_numpy(images.copy()), torch.from_numpy(labels.astype(np.int64))]


def _read(path: Path, name: str, root: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        _unusable(name, path, "not there", root)
    except OSError as error:
        raise UserError(f"data set {name}: {path} cannot be read: {error.strerror}", ExitCode.RESOURCES) from None


def _read_idx(path: Path, dimensions: int, name: str, root: Path) -> NDArray[np.uint8]:
    """The array in a file of the idx format.

    0, 0, type 8 (bytes), number of dimensions, their sizes as big-endian 32 bits, then the bytes.
    """
    content = _read(path, name, root)
    header = 4 + 4 * dimensions
    if len(content) < header or content[:4] != bytes((0, 0, 8, dimensions)):
        _unusable(name, path, "not an idx file, or cut off", root)
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    expected = int(np.prod(shape, dtype=np.int64))
    if len(content) != header + expected:
        _unusable(name, path, f"{len(content) - header:,} bytes of data instead of {expected:,}", root)
    return np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape)


def _read_cifar(path: Path, root: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images and labels of a batch file: a pickled dictionary of `data`, bytes [n, 3072] by channel, and `labels`."""
    content = _read(path, "cifar10", root)
    try:
        entries = _ArraysOnly(io.BytesIO(content), encoding="latin1").load()
        images = np.asarray(entries["data"], dtype=np.uint8).reshape(-1, 3, 32, 32)
        return images, np.asarray(entries["labels"], dtype=np.int64)
    except Exception as error:  # a damaged pickle can raise anything
        _unusable("cifar10", path, f"not a batch file, or cut off ({type(error).__name__})", root)


class _ArraysOnly(pickle.Unpickler):
    """Reads pickles of numpy arrays and refuses everything else, because a pickle can run any code."""

    def find_class(self, module: str, name: str) -> Any:
        if (module.replace("numpy._core", "numpy.core"), name) in {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy.core.numeric", "_frombuffer"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        }:
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        raise pickle.UnpicklingError(f"the file asks for {module}.{name}; data files may hold arrays only")


def _unusable(name: str, path: Path, reason: str, root: Path) -> NoReturn:
    from ddp_core.data.fetch import fetch_command  # it imports the network's modules, which no run needs

    raise UserError(
        f"data set {name}: {path}: {reason}; fetch it first: {fetch_command(name, root)}, or name the folder that "
        "holds it with --data-dir DIR"
    )

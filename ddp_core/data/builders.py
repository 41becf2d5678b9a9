"""Data sets by name: functions with keyword options that return `Splits`, the same in every process.

Synthetic data is drawn by numpy's PCG64 from the option `seed`. The experiment's own seed does not change it, so an
experiment can be repeated with other weights and another order on the same samples. Each builder that reads files has a
parameter `root`, the data directory.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ddp_core.base.errors import UserError
from ddp_core.base.extras import Functions, require
from ddp_core.data.splits import ByteImages, InMemory, Splits, content_digest, stratified


def digits(augment: bool = True, test_share: float = 0.2) -> Splits:
    """scikit-learn's 1,797 handwritten digits: inputs float32 [1, 8, 8] in [0, 1], targets 0..9.

    The held-out share is drawn per class with a seed of its own, so it is the same for every experiment. `augment`
    turns, moves and resizes each training image a little. Source: E. Alpaydin, C. Kaynak, Optical Recognition of
    Handwritten Digits, UCI (1998).
    """
    if not 0 < test_share < 1:
        raise UserError(f"data digits: test_share {test_share} must lie between 0 and 1, for example 0.2")
    pixels, labels = _digit_table()
    images = torch.from_numpy(pixels.astype(np.float32) / 16).view(-1, 1, 8, 8)
    targets = torch.from_numpy(labels)
    held_out = stratified(labels, test_share)
    train, test = torch.from_numpy(np.flatnonzero(~held_out)), torch.from_numpy(np.flatnonzero(held_out))
    augmentation = None
    if augment:
        from ddp_core.data.augment import turn_shift_scale

        augmentation = turn_shift_scale()
    return Splits(
        train=InMemory(images[train], targets[train]),
        test=InMemory(images[test], targets[test]),
        classes=10,
        augmentation=augmentation,
        digest=content_digest(images[train], targets[train], images[test], targets[test]),
    )


def linear_data(size: int = 10_000, test_size: int = 2_000, noise: float = 0.1, seed: int = 0) -> Splits:
    """Points on y = 2x + 3 + noise: inputs and targets float32 [1], x and the noise normal."""
    generator = np.random.Generator(np.random.PCG64(seed))
    total = size + test_size
    x = generator.standard_normal((total, 1), dtype=np.float32)
    y = 2 * x + 3 + np.float32(noise) * generator.standard_normal((total, 1), dtype=np.float32)
    inputs, targets = torch.from_numpy(x), torch.from_numpy(y)
    test = InMemory(inputs[size:], targets[size:]) if test_size > 0 else None
    return Splits(InMemory(inputs[:size], targets[:size]), test, None, None, content_digest(inputs, targets))


def counter_data(size: int = 100, features: int = 10, seed: int = 0) -> Splits:
    """Normal inputs [features] with random labels 0.0 or 1.0: there is nothing to learn."""
    generator = np.random.Generator(np.random.PCG64(seed))
    inputs = torch.from_numpy(generator.standard_normal((size, features), dtype=np.float32))
    targets = torch.from_numpy(generator.integers(0, 2, size).astype(np.float32))
    return Splits(InMemory(inputs, targets), None, 2, None, content_digest(inputs, targets))


def toy_data(size: int = 32, seed: int = 0) -> Splits:
    """Normal inputs [10] with normal targets [1], unrelated to each other."""
    generator = np.random.Generator(np.random.PCG64(seed))
    inputs = torch.from_numpy(generator.standard_normal((size, 10), dtype=np.float32))
    targets = torch.from_numpy(generator.standard_normal((size, 1), dtype=np.float32))
    return Splits(InMemory(inputs, targets), None, None, None, content_digest(inputs, targets))


def random_images(
    samples: int = 25_600, image_size: int = 224, classes: int = 10, pool: int = 256, seed: int = 0
) -> Splits:
    """Normal noise [3, image_size, image_size] with random labels, for measuring speed.

    Only `pool` different images exist (150 MB at 256 images of 224x224): sample `id` is image `id % pool`. As images
    are repeated, the loss can fall.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    kept = min(pool, samples)
    inputs = torch.from_numpy(generator.standard_normal((kept, 3, image_size, image_size), dtype=np.float32))
    targets = torch.from_numpy(generator.integers(0, classes, kept))
    return Splits(InMemory(inputs, targets, samples), None, classes, None, content_digest(inputs, targets))


def random_byte_images(
    samples: int = 25_600, image_size: int = 224, classes: int = 10, pool: int = 256, seed: int = 0
) -> Splits:
    """Noise as `random_images`, kept as bytes like photographs: float32 [3, image_size, image_size] within 1.74 of 0.

    The values are uniform. On a GPU only a quarter of the bytes travels to the device.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    kept = min(pool, samples)
    images = torch.from_numpy(generator.integers(0, 256, (kept, 3, image_size, image_size), dtype=np.uint8))
    targets = torch.from_numpy(generator.integers(0, classes, kept))
    deviation = 12**-0.5  # of a number uniform in [0, 1]
    train = ByteImages(images, targets, [0.5] * 3, [deviation] * 3, samples)
    return Splits(train, None, classes, None, content_digest(images, targets))


def _digit_table() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Pixels [1797, 64] in 0..16 and labels, read from scikit-learn's file: importing it would cost each rank 0.5 s."""
    require("data digits", "digits")
    spec = find_spec("sklearn")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        raise UserError(
            f"data digits: {path} is missing; install scikit-learn again: pip install --force-reinstall scikit-learn"
        )
    with gzip.open(path) as file:
        table = np.array([line.split(b",") for line in file], dtype=np.float32)
    return table[:, :-1].astype(np.uint8), table[:, -1].astype(np.int64)


DATA: Mapping[str, Callable[..., Splits]] = Functions(
    digits=digits,
    linear_data=linear_data,
    counter_data=counter_data,
    toy_data=toy_data,
    random_images=random_images,
    random_byte_images=random_byte_images,
    characters="ddp_core.data.characters",
    fashion_mnist="ddp_core.data.vision",
    cifar10="ddp_core.data.vision",
    image_folder="ddp_core.data.image_folder",
)

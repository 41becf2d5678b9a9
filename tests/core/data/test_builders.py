"""Data sets by their names: their content and splits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ddp_core.data.builders import DATA
from ddp_core.data.splits import InMemory

SMALL = {name: {"samples": 50, "image_size": 8, "pool": 20} for name in ("random_images", "random_byte_images")}
WITHOUT_FILES = sorted(set(DATA) - {"fashion_mnist", "cifar10", "image_folder"})


def in_memory(dataset: object) -> InMemory:
    assert isinstance(dataset, InMemory)
    return dataset


@pytest.mark.parametrize("name", WITHOUT_FILES)
def test_shapes_and_types(name: str) -> None:
    splits = DATA[name](**SMALL.get(name, {}))
    for dataset in (splits.train, splits.test):
        if dataset is None:
            continue
        inputs, targets = in_memory(dataset).__getitems__(np.array([3, 0, 3]))
        assert inputs.dtype == (torch.int64 if name == "characters" else torch.float32)
        assert len(inputs) == len(targets) == 3
        one, target = dataset[3]
        torch.testing.assert_close(inputs[0], one, rtol=0, atol=0)
        torch.testing.assert_close(targets[2], target, rtol=0, atol=0)
        with pytest.raises(IndexError):
            dataset[len(dataset)]


def test_the_seed_option_and_nothing_else_changes_synthetic_data() -> None:
    for name in WITHOUT_FILES:
        # torch and numpy may have drawn in between
        first, again = (DATA[name](**SMALL.get(name, {})) for _ in range(2))
        assert first.digest == again.digest
    for name in ("linear_data", "counter_data", "toy_data"):
        assert DATA[name]().digest != DATA[name](seed=1).digest


@pytest.mark.parametrize(("name", "digest"), [("digits", "57c8d5664d5ee3d0"), ("linear_data", "83be10212f428043")])
def test_samples_are_the_same_in_every_version(name: str, digest: str) -> None:
    content = DATA[name]().digest
    assert content is not None
    assert content.startswith(digest)

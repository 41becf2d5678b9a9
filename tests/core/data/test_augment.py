"""Augmentation, compared with a plain reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ddp_core.data.augment import Augmentation, crop_and_flip, shift_and_flip, turn_shift_scale


@pytest.mark.parametrize(
    ("augmentation", "height"),
    [(shift_and_flip(2), 9), (shift_and_flip(1, flip=True), 9), (turn_shift_scale(), 9), (crop_and_flip(7), 7)],
)
def test_augmentation_of_a_sample_does_not_depend_on_its_company(augmentation: Augmentation, height: int) -> None:
    images = torch.rand(13, 3, 9, 7)
    uniforms = np.random.default_rng(0).random((13, augmentation.draws))
    whole = augmentation.apply(images, uniforms)
    assert whole.shape == (13, 3, height, 7)
    assert whole.is_contiguous()
    for index in range(13):
        single = augmentation.apply(images[index : index + 1], uniforms[index : index + 1])
        assert torch.equal(whole[index], single[0])


def test_an_image_is_cut_and_flipped_as_written() -> None:
    images = torch.arange(1.0, 2 * 3 * 4 * 5 + 1).view(2, 3, 4, 5)
    uniforms = np.array([[0.0, 0.99, 0.7], [0.4, 0.2, 0.1]])
    result = shift_and_flip(1, flip=True).apply(images, uniforms)
    padded = torch.nn.functional.pad(images, (1, 1, 1, 1))
    assert torch.equal(result[0], padded[0, :, 0:4, 2:7])
    assert torch.equal(result[1], padded[1, :, 1:5, 0:5].flip(2))
    cropped = crop_and_flip(3).apply(images, np.array([[0.0, 0.99, 0.7], [0.99, 0.0, 0.1]]))
    assert torch.equal(cropped[0], images[0, :, 0:3, 2:5])
    assert torch.equal(cropped[1], images[1, :, 1:4, 0:3].flip(2))


def test_turn_shift_scale_is_grid_sample_up_to_rounding() -> None:
    images, uniforms = torch.rand(50, 3, 9, 7), np.random.default_rng(1).random((50, 4))
    change = turn_shift_scale(turn=0.5, shift=4.0, scale=0.5)  # far enough to leave the image on all sides
    turn, column, row, size = torch.as_tensor(2 * uniforms - 1).float().view(50, 4, 1, 1).unbind(1)
    x = ((torch.arange(7) * 2 + 1) / 7 - 1).view(1, 1, 7)
    y = ((torch.arange(9) * 2 + 1) / 9 - 1).view(1, 9, 1)
    # In the coordinates of grid_sample an image is 2 wide and 2 high, so a turn stretches what is not square.
    across = (1 + 0.5 * size) * x - 0.5 * turn * y * 9 / 7 + 4.0 * column * 2 / 7
    down = 0.5 * turn * x * 7 / 9 + (1 + 0.5 * size) * y + 4.0 * row * 2 / 9
    grid = torch.stack((across, down), dim=-1)
    expected = torch.nn.functional.grid_sample(images, grid, align_corners=False)
    result = change.apply(images, uniforms)
    assert (result == 0).any()
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)

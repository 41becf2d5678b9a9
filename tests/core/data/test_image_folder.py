"""Image files in folders: which samples they become, what is said of wrong folders and files, and one digest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.data.image_folder import image_folder
from ddp_core.data.loader import Loader
from tests.support.wording import refusing

CLASSES = ("ants", "bees", "cats")


def write_images(place: Path, count: int = 10, classes: tuple[str, ...] = CLASSES) -> None:
    """`count` images per class: JPEG files of several sizes, and two PNG files, written in no sequence."""
    generator = np.random.default_rng(0)
    for number in generator.permutation(count):
        for label, name in enumerate(classes):
            height, width = generator.integers(20, 60, 2)
            pixels = generator.integers(0, 100, (height, width, 3), dtype=np.uint8)
            pixels[..., label] += 100
            image = Image.fromarray(pixels)
            file = place / name / f"{number:02}.jpg"
            if number == 3:
                image, file = image.convert("L"), file.with_suffix(".PNG")
            if number == 4:
                image, file = image.convert("RGBA"), file.with_suffix(".png")
            if number == 5:
                file = file.with_suffix(".JPEG")
            file.parent.mkdir(parents=True, exist_ok=True)
            image.save(file)


def as_in_the_docs(path: Path, size: int) -> torch.Tensor:
    """The sample of an image file that was not augmented."""
    stored = size + size // 8
    with Image.open(path) as image:
        image.draft("RGB", (stored, stored))
        square = ImageOps.fit(image.convert("RGB"), (stored, stored), Image.Resampling.BILINEAR)
    edge = (stored - size) // 2
    pixels = torch.from_numpy(np.array(square)).permute(2, 0, 1)[:, edge : edge + size, edge : edge + size]
    mean, deviation = torch.tensor((0.485, 0.456, 0.406)), torch.tensor((0.229, 0.224, 0.225))
    return (pixels / 255 - mean.view(3, 1, 1)) / deviation.view(3, 1, 1)


def test_every_file_is_a_sample_with_its_folder_for_a_label(tmp_path: Path) -> None:
    write_images(tmp_path / "mine")
    (tmp_path / "mine" / "ants" / "notes.txt").write_text("no image")
    (tmp_path / "mine" / "bees" / "1.WEBP").write_text("of a kind that is not read")
    (tmp_path / "mine" / ".hidden").mkdir()
    splits = image_folder(tmp_path, "mine", image_size=16, test_share=0.2, augment=False)
    assert (splits.classes, splits.augmentation) == (3, None)
    assert splits.test is not None
    assert (len(splits.train), len(splits.test), splits.note) == (24, 6, "left out 2 files: 1 .txt, 1 .webp")
    assert [splits.test[index][1] for index in range(6)] == [0, 0, 1, 1, 2, 2]
    files = list(splits.files)
    assert {
        path for path in (tmp_path / "mine").rglob("*.*") if path.suffix not in (".txt", ".WEBP") and path.is_file()
    } == set(files)
    assert files[:24] == sorted(files[:24])
    for index, path in enumerate(files):
        image, label = splits.train[index] if index < 24 else splits.test[index - 24]
        assert CLASSES[label] == path.parent.name
        torch.testing.assert_close(image, as_in_the_docs(path, 16))
    assert image_folder(tmp_path, "mine", test_share=0).test is None


def test_a_folder_that_links_lead_to_again_counts_once(tmp_path: Path) -> None:
    write_images(tmp_path / "mine", count=2)
    (tmp_path / "mine" / "ants" / "again").symlink_to(tmp_path / "mine" / "ants")
    assert len(image_folder(tmp_path, "mine", test_share=0).train) == 6


@pytest.mark.parametrize("held_out", ["val", "valid", "validation", "test"])
def test_folders_of_held_out_images_are_used(held_out: str, tmp_path: Path) -> None:
    write_images(tmp_path / "mine" / "train", count=3)
    write_images(tmp_path / "mine" / held_out, count=2, classes=CLASSES[1:])
    splits = image_folder(tmp_path, "mine", image_size=8)
    assert splits.test is not None
    assert (len(splits.train), [splits.test[index][1] for index in range(4)]) == (9, [1, 1, 2, 2])
    write_images(tmp_path / "mine" / held_out, count=1, classes=("dogs",))
    with refusing():
        image_folder(tmp_path, "mine")


def test_training_images_are_cut_and_mirrored_by_seed_epoch_and_id(tmp_path: Path) -> None:
    write_images(tmp_path / "mine", count=4)
    splits = image_folder(tmp_path, "mine", image_size=16, test_share=0)
    loader = Loader(splits.train, splits.augmentation, seed=3)
    ids = np.arange(12)
    inputs, targets = loader.fetch(0, ids)
    assert inputs.shape == (12, 3, 16, 16)
    assert targets.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert torch.equal(loader.fetch(0, ids[5:7])[0], inputs[5:7])
    assert not torch.equal(loader.fetch(1, ids)[0], inputs)


@pytest.mark.parametrize("folder", ["nothing", "flat", "hollow"])
def test_wrong_folders_are_explained_in_one_line(folder: str, tmp_path: Path) -> None:
    write_images(tmp_path / "flat", classes=("",))
    write_images(tmp_path / "hollow")
    for path in (tmp_path / "hollow" / "bees").iterdir():
        path.unlink()
    with refusing():
        image_folder(tmp_path, folder)


@pytest.mark.parametrize("damage", ["cut", "text", "empty", "gone"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_file_is_named(workers: int, damage: str, tmp_path: Path) -> None:
    write_images(tmp_path / "mine", count=3)
    splits = image_folder(tmp_path, "mine", image_size=8, test_share=0)
    broken = splits.files[4]
    content = broken.read_bytes()
    broken.unlink()
    if damage != "gone":
        broken.write_bytes({"cut": content[: len(content) // 2], "text": b"<html>404</html>", "empty": b""}[damage])
    with pytest.raises(UserError, match=f"{broken} cannot be {'read' if damage == 'gone' else 'decoded'}: ") as failure:
        list(Loader(splits.train, workers=workers).stream([(0, [np.arange(9)])]))
    assert failure.value.exit_code == (ExitCode.RESOURCES if damage == "gone" else ExitCode.BAD_INPUT)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_a_file_of_more_than_8_bits_is_refused(dtype: Any, tmp_path: Path) -> None:
    """Pillow would make 255 of every larger value, without a word."""
    write_images(tmp_path / "mine", count=3)
    splits = image_folder(tmp_path, "mine", image_size=8, test_share=0)
    wide = splits.files[4]
    pixels = np.arange(400).reshape(20, 20) * 100
    Image.fromarray(pixels.astype(dtype)).save(wide, "PNG" if dtype == np.uint16 else "TIFF")
    with refusing():
        splits.train[4]

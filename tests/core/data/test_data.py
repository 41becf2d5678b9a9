"""Data sets: their content, splits and files; augmentation compared with a plain reference."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddp_core.base.errors import UserError
from ddp_core.data import characters
from ddp_core.data.augment import Augmentation, crop_and_flip, shift_and_flip, turn_shift_scale
from ddp_core.data.builders import DATA
from ddp_core.data.splits import InMemory
from tests.support.wording import refusing

SMALL = {name: {"samples": 50, "image_size": 8, "pool": 20} for name in ("random_images", "random_byte_images")}
WITHOUT_FILES = sorted(set(DATA) - {"fashion_mnist", "cifar10", "image_folder"})


def write_idx(path: Path, content: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        bytes((0, 0, 8, content.ndim)) + struct.pack(f">{content.ndim}I", *content.shape) + content.tobytes()
    )


def write_fashion(root: Path, train: int = 30, test: int = 10) -> None:
    generator = np.random.default_rng(0)
    for split, count in (("train", train), ("t10k", test)):
        folder = root / "FashionMNIST" / "raw"
        write_idx(folder / f"{split}-images-idx3-ubyte", generator.integers(0, 256, (count, 28, 28), dtype=np.uint8))
        write_idx(folder / f"{split}-labels-idx1-ubyte", (np.arange(count) % 10).astype(np.uint8))


def python2_pickle(data: np.ndarray, labels: list[int]) -> bytes:
    """The bytes that Python 2 wrote for {'data': array, 'labels': list}: the published files are such pickles."""
    rows, columns = (b"M" + struct.pack("<H", size) for size in data.shape)
    raw = data.tobytes()
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01" + rows + columns + b"\x86" + dtype + b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
    )
    numbers = b"](" + b"".join(b"K" + bytes((label,)) for label in labels) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels" + numbers + b"u."


def write_cifar(root: Path, per_file: int = 8) -> None:
    generator = np.random.default_rng(1)
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        data = generator.integers(0, 256, (per_file, 3072), dtype=np.uint8)
        labels = generator.integers(0, 10, per_file).tolist()
        (folder / name).write_bytes(python2_pickle(data, labels))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}, protocol=2))


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


def test_characters_are_followed_by_their_targets() -> None:
    splits = DATA["characters"](length=20, stride=7)
    train, test = in_memory(splits.train), in_memory(splits.test)
    assert torch.equal(train.inputs[:, 1:], train.targets[:, :-1])
    assert torch.equal(train.inputs[1, :14], train.targets[0, 6:])
    begin, end = (bytes(inputs.tolist()).decode("ascii") for inputs in (train.inputs[60], test.targets[-1]))
    assert (begin, end) == ("o\npictures or conver", "                   T")
    held_out = bytes(test.inputs.flatten().tolist())
    assert bytes(train.inputs[-1].tolist()) not in held_out
    assert len(held_out) == 742 * 20
    assert splits.digest != DATA["characters"](length=21, stride=7).digest


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_a_book_that_is_not_as_it_came_is_refused(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = tmp_path / "alice.txt"
    if damage == "changed":
        book.write_bytes(characters.BOOK.read_bytes().replace(b"\n", b"\r\n"))
    monkeypatch.setattr(characters, "BOOK", book)
    with refusing():
        DATA["characters"]()


@pytest.mark.parametrize("options", [{"length": 0}, {"stride": 0}, {"test_share": 0.0}, {"length": 20_000}])
def test_characters_need_room_for_a_sample_and_digits_a_share(options: dict[str, float]) -> None:
    with refusing():
        DATA["characters"](**options)
    for share in (0.0, 1.0):
        with pytest.raises(UserError, match="test_share"):
            DATA["digits"](test_share=share)


@pytest.mark.parametrize(("name", "digest"), [("digits", "57c8d5664d5ee3d0"), ("linear_data", "83be10212f428043")])
def test_samples_are_the_same_in_every_version(name: str, digest: str) -> None:
    content = DATA[name]().digest
    assert content is not None
    assert content.startswith(digest)


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


@pytest.mark.parametrize(
    ("name", "write", "theirs", "statistics"),
    [
        ("fashion_mnist", write_fashion, "FashionMNIST", ((0.2860,), (0.3530,))),
        ("cifar10", write_cifar, "CIFAR10", ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))),
    ],
)
def test_published_files_are_read_as_torchvision_reads_them(
    name: str, write: Any, theirs: str, statistics: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ddp_core.base.torchvision_import import import_torchvision

    write(tmp_path)
    library = import_torchvision("datasets")
    # These files do not have the published sums.
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    splits = DATA[name](root=tmp_path)
    mean, deviation = (torch.tensor(values).view(-1, 1, 1) for values in statistics)
    for dataset, train in ((splits.train, True), (splits.test, False)):
        known = getattr(library, theirs)(tmp_path, train=train)
        pixels = torch.as_tensor(known.data).reshape(len(known), *known.data.shape[1:3], -1).permute(0, 3, 1, 2) / 255
        inputs, targets = in_memory(dataset).__getitems__(np.arange(len(known)))
        torch.testing.assert_close(inputs, (pixels - mean) / deviation)
        assert targets.tolist() == torch.as_tensor(known.targets).tolist()
    assert splits.classes == 10
    assert splits.augmentation is not None
    for unchanged in (DATA[name](root=tmp_path, augment=False), DATA["digits"](augment=False)):
        assert unchanged.augmentation is None


@pytest.mark.parametrize("name", ["fashion_mnist", "cifar10"])
def test_missing_data_names_the_command_that_fetches_it(name: str, tmp_path: Path) -> None:
    with refusing():
        DATA[name](root=tmp_path / "nothing")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("fashion_mnist", "FashionMNIST/raw/train-images-idx3-ubyte"),
        ("fashion_mnist", "FashionMNIST/raw/t10k-labels-idx1-ubyte"),
        ("cifar10", "cifar-10-batches-py/test_batch"),
    ],
)
@pytest.mark.parametrize("damage", ["missing", "cut", "empty", "other"])
def test_partial_and_damaged_files_are_noticed(name: str, file: str, damage: str, tmp_path: Path) -> None:
    (write_fashion if name == "fashion_mnist" else write_cifar)(tmp_path)
    path = tmp_path / file
    content = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes({"cut": content[:-3], "empty": b"", "other": b"<html>404</html>"}[damage])
    with refusing():
        DATA[name](root=tmp_path)


def test_labels_must_fit_the_images_and_the_classes(tmp_path: Path) -> None:
    write_fashion(tmp_path)
    labels = tmp_path / "FashionMNIST" / "raw" / "train-labels-idx1-ubyte"
    write_idx(labels, np.zeros(29, dtype=np.uint8))
    with refusing():
        DATA["fashion_mnist"](root=tmp_path)
    write_idx(labels, np.full(30, 10, dtype=np.uint8))
    with refusing():
        DATA["fashion_mnist"](root=tmp_path)


class Trap:
    """A malicious pickle: its code runs while the pickle is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.path,)


def test_a_malicious_batch_file_is_refused_and_not_run(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    mark = tmp_path / "ran"
    (tmp_path / "cifar-10-batches-py" / "data_batch_2").write_bytes(pickle.dumps(Trap(mark)))
    with pytest.raises(UserError, match="data_batch_2"):
        DATA["cifar10"](root=tmp_path)
    assert not mark.exists()

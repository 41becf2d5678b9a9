"""Published files of images are read as torchvision reads them; what is missing, damaged or malicious is refused."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ddp_core.base.errors import UserError
from ddp_core.data.builders import DATA
from tests.core.data.test_builders import in_memory
from tests.support.wording import refusing


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

"""Photographs in folders, one folder per class: decoded where they are loaded, cropped and mirrored by a sample's key.

The bits of a decoded JPEG file depend on Pillow and the libjpeg in it; `run.json` names Pillow's version.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.data.augment import crop_and_flip
from ddp_core.data.splits import Splits, Staged, Standardise, stratified
from ddp_core.sampler import Ids

ENDINGS = (".jpg", ".jpeg", ".png")
HELD_OUT = ("val", "valid", "validation", "test")
"""The folders beside `train` whose images are held out: the first that is there."""
_WIDE = ("I", "F")
"""How the modes of Pillow begin whose values `convert("RGB")` would cut off at 255, as those of a 16-bit PNG file."""
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def image_folder(
    root: Path,
    folder: str,
    image_size: int = 224,
    test_share: float = 0.1,
    augment: bool = True,
) -> Splits:
    """JPEG and PNG files below `root/folder`: inputs float32 [3, image_size, image_size], targets 0, 1, … by class.

    `folder` has one folder per class, or it has the folders `train` and one of HELD_OUT with one per class in each.
    Without the latter, `test_share` of every class is held out, the same files for every experiment. Classes and files
    are numbered in the sequence of their names; a folder that is linked twice in a class counts once. An image is cut
    to a square around its middle and resized (bilinear, with antialiasing) to a side an eighth larger than
    `image_size`, of which the middle is used; with `augment`, training uses a random part of it, half of the time
    mirrored. Values are standardised with ImageNet's means and deviations, as is usual.

    Raises UserError where folders or files are missing, and during training for a file that cannot be decoded.
    """
    place = root / folder
    if not place.is_dir():
        raise UserError(
            f"data image_folder: {place} is not there; let --data-dir (now {root}) name the directory that has {folder}"
        )
    if not 0 <= test_share < 1:
        raise UserError(f"data image_folder: test_share {test_share} must be at least 0 and below 1")
    source = place / "train" if _folders(place / "train") else place
    held_out = [place / name for name in HELD_OUT if source != place and (place / name).is_dir()]
    classes = _folders(source)
    if not classes:
        raise UserError(
            f"data image_folder: {source} has no folders; it needs one for each class, such as {source}/cats/1.jpg"
        )
    left = Counter[str]()
    train = _listed(source, classes, classes, left)
    if held_out:
        test = _listed(held_out[0], _folders(held_out[0]), classes, left)
    else:
        chosen = stratified(np.array([label for _, label in train]), test_share)
        train, test = ([file for file, out in zip(train, chosen, strict=True) if out == half] for half in (False, True))
    count, stored = len(train), image_size + image_size // 8
    names = np.array([os.fsencode(path) for path, _ in (*train, *test)])
    labels = np.array([label for _, label in (*train, *test)])
    commonest = ", ".join(f"{number} {ending}" for ending, number in sorted(left.most_common(9)))
    return Splits(
        train=ImageFiles(Paths(names[:count]), labels[:count], stored, stored if augment else image_size),
        test=ImageFiles(Paths(names[count:]), labels[count:], stored, image_size) if test else None,
        classes=len(classes),
        augmentation=crop_and_flip(image_size) if augment else None,
        files=Paths(names),
        note=f"left out {left.total()} files: {commonest}" if left else "",
    )


class Paths(Sequence[Path]):
    """Paths kept as bytes in one array: a million of them as objects would take every rank some 300 MB."""

    def __init__(self, names: NDArray[np.bytes_]) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> Path:  # type: ignore[override]
        return Path(os.fsdecode(self.names[index]))


class ImageFiles(Staged[tuple[Tensor, int]]):
    """Image files with labels; a sample is the middle of an image that is decoded as `stored` x `stored` pixels.

    `size`: the pixels of this middle part, each way.
    """

    def __init__(self, paths: Sequence[Path], labels: NDArray[np.int64], stored: int, size: int) -> None:
        self.paths, self.labels, self.stored = paths, labels, stored
        edge = (stored - size) // 2
        self.middle = slice(edge, edge + size)
        self._standardise = Standardise(_MEAN, _DEVIATION)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._standardise(self._pixels(index)), int(self.labels[index])

    def gather(self, ids: Ids | Sequence[int], pin_memory: bool = False) -> tuple[Any, Tensor]:
        """The decoded pixels, uint8 [n, 3, size, size], and the labels."""
        side = self.middle.stop - self.middle.start
        pixels = torch.empty((len(ids), 3, side, side), dtype=torch.uint8, pin_memory=pin_memory)
        for place, index in zip(pixels, ids, strict=True):
            place.copy_(self._pixels(index))
        return pixels, torch.tensor(self.labels[np.asarray(ids, dtype=np.int64)])

    def finish(self, inputs: Any) -> Tensor:
        """The images standardised, float32."""
        return self._standardise(inputs)

    def _pixels(self, index: int) -> Tensor:
        return _decoded(self.paths[index], self.stored)[:, self.middle, self.middle]


def _decoded(path: Path, side: int) -> Tensor:
    """The image as uint8 [3, side, side]. Raises UserError that names the file."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            # A JPEG file can be decoded at a half, a quarter or an eighth of its size, in a part of the time.
            image.draft("RGB", (side, side))
            if image.mode.startswith(_WIDE):
                raise UserError(
                    f"data image_folder: {path} has more than 8 bits per channel (Pillow's mode {image.mode}); "
                    "convert it to 8 bits, and start anew"
                )
            square = ImageOps.fit(image.convert("RGB"), (side, side), Image.Resampling.BILINEAR)
    except (MemoryError, UserError):
        raise
    except Exception as error:  # a damaged file can raise anything
        system = isinstance(error, OSError) and error.errno is not None
        raise UserError(
            f"data image_folder: {path} cannot be {'read' if system else 'decoded'}: {' '.join(str(error).split())}; "
            "mend or remove it, and start anew",
            ExitCode.RESOURCES if system else ExitCode.BAD_INPUT,
        ) from None
    return torch.from_numpy(np.array(square)).permute(2, 0, 1)


def _folders(place: Path) -> list[str]:
    """The names of the folders in `place`, sorted; none where there is no such place."""
    if not place.is_dir():
        return []
    return sorted(entry.name for entry in os.scandir(place) if entry.is_dir() and not entry.name.startswith("."))


def _listed(place: Path, present: Sequence[str], classes: Sequence[str], left: Counter[str]) -> list[tuple[str, int]]:
    """The image files of the classes present in `place`, with labels, sorted by class and name.

    `left` counts the other files, by their endings. Raises UserError for a class without images, or one that `classes`
    does not have.
    """
    files = []
    for name in present:
        if name not in classes:
            raise UserError(f"data image_folder: {place / name} is a class that the training images do not have")
        every = {file: Path(file).suffix.lower() for file in _each_file_once(place / name)}
        found = [file for file, ending in every.items() if ending in ENDINGS]
        left.update(ending or "without an ending" for ending in every.values() if ending not in ENDINGS)
        if not found:
            raise UserError(f"data image_folder: {place / name} has no images ({', '.join(ENDINGS)})")
        label = classes.index(name)
        files += [(path, label) for path in sorted(found)]
    return files


def _each_file_once(place: Path) -> Iterator[str]:
    """The files below `place` that are not hidden; those of a folder once, though links may lead to it again."""
    seen = set()
    for folder, folders, names in os.walk(place, followlinks=True):
        here = Path(folder).stat()
        if (identity := (here.st_dev, here.st_ino)) in seen:
            folders.clear()
            continue
        seen.add(identity)
        folders.sort()
        yield from (os.path.join(folder, name) for name in names if not name.startswith("."))  # noqa: PTH118

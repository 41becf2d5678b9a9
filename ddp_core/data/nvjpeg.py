"""JPEG files decoded by the GPU that trains: by nvJPEG, through torchvision, and resized there.

nvJPEG's pixels differ from Pillow's by a few of 256 levels. A file has the same ones whatever other files are decoded
with it, and so on every layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.torchvision_import import import_torchvision

Decode = Callable[[list[Tensor]], list[Tensor]]
"""From files, uint8 [bytes] in host memory, to their images, uint8 [3, height, width] on the device."""

_FILES_AT_ONCE = 64
"""More at a time are not decoded faster (an H200), and the images of all of them lie in the device's memory."""
_ELEMENTS_AT_ONCE = 1 << 25
"""So many values of images of one size are resized by one call."""
_LACKING = ("nvJPEG support", "image extension")
"""Words in torchvision's errors that mean: it was built without nvJPEG, or for another torch."""
WAY_OUT = "or let Pillow decode: --set data.decoder=pillow"


@dataclass(frozen=True)
class Encoded:
    """Files as they were read. The loader moves only tensors, so they stay in host memory, where nvJPEG reads them."""

    paths: Sequence[Path]
    contents: Sequence[bytes]


def read_jpeg(path: Path) -> bytes:
    """The content of a file. Raises UserError where it cannot be read, or has no end.

    nvJPEG decodes a file that was cut off without a word, and makes up the rest of the image.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _unusable(path, f"be read: {error.strerror}", ExitCode.RESOURCES) from None
    if not content.rstrip(b"\0").endswith(b"\xff\xd9"):
        raise _unusable(path, "be decoded: it is no JPEG file, was cut off, or has something behind its end")
    return content


def decoded(files: Encoded, side: int, decode: Decode | None = None) -> Tensor:
    """The middle square of each image, resized to `side` x `side`: uint8 [n, 3, side, side] on the current device.

    `decode` stands for nvJPEG where another one is wanted. Raises UserError for a file that cannot be decoded.
    """
    decode = decode or _by_nvjpeg
    squares = []
    for begin in range(0, len(files.paths), _FILES_AT_ONCE):
        part = slice(begin, begin + _FILES_AT_ONCE)
        squares.append(_squares(_images(files.paths[part], files.contents[part], decode), side))
    return torch.cat(squares)


def _images(paths: Sequence[Path], contents: Sequence[bytes], decode: Decode) -> list[Tensor]:
    encoded = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in contents]
    try:
        return decode(encoded)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if any(words in str(error) for words in _LACKING):
            raise UserError(
                f"data image_folder: this torchvision cannot decode on a GPU ({str(error).splitlines()[0]}); take one "
                f"built for this torch and CUDA, {WAY_OUT}",
                ExitCode.RESOURCES,
            ) from None
        # It does not say which file is meant.
        for path, alone in zip(paths, encoded, strict=True):
            try:
                decode([alone])
            except RuntimeError as reason:
                raise _unusable(path, f"be decoded by nvJPEG: {str(reason).splitlines()[0]}") from None
        raise


def _by_nvjpeg(encoded: list[Tensor]) -> list[Tensor]:
    io, stream = import_torchvision("io"), torch.cuda.current_stream()
    # torchvision decodes on a stream of its own, into memory whose last reader on this stream it does not wait for
    # (csrc/io/image/cuda/decode_jpegs_cuda.cpp). Afterwards it may still read `encoded`. Training does not wait, as
    # the loader's thread calls this ahead of it; an evaluation and steps that are too large to lie ahead do wait.
    stream.synchronize()
    images: list[Tensor] = io.decode_jpeg(encoded, mode=io.ImageReadMode.RGB, device=stream.device)
    stream.synchronize()
    return images


def _squares(images: Sequence[Tensor], side: int) -> Tensor:
    """Their middle squares, bilinear with antialiasing; images of one size together, which changes no bit."""
    by_size: dict[torch.Size, list[int]] = defaultdict(list)
    for number, image in enumerate(images):
        by_size[image.shape].append(number)
    rows: list[Tensor] = [images[0]] * len(images)
    for (channels, height, width), numbers in by_size.items():
        edge = min(height, width)
        top, left = (height - edge) // 2, (width - edge) // 2
        count = max(1, _ELEMENTS_AT_ONCE // (channels * edge * edge))
        for begin in range(0, len(numbers), count):
            some = numbers[begin : begin + count]
            squares = torch.stack([images[number][:, top : top + edge, left : left + edge] for number in some])
            resized = functional.interpolate(squares.float(), (side, side), mode="bilinear", antialias=True)
            for number, row in zip(some, resized.round_().clamp_(0, 255).to(torch.uint8), strict=True):
                rows[number] = row
    return torch.stack(rows)


def _unusable(path: Path, why: str, code: ExitCode = ExitCode.BAD_INPUT) -> UserError:
    return UserError(f"data image_folder: {path} cannot {why}; mend or remove it and start anew, {WAY_OUT}", code)

"""JPEG files that nvJPEG decodes: the same bits on every layout, near Pillow's, and a broken file is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ddp_core.base.errors import UserError
from ddp_core.data.image_folder import image_folder
from ddp_core.data.loader import Loader
from tests.core.data.test_nvjpeg import EXPERIMENT, write_photos
from tests.support.commands import ddp, trained
from tests.support.standin_cuda.installing import VARIABLE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(f"'{VARIABLE}' in __import__('os').environ", reason="nobody plays nvJPEG"),
]

CUDA = torch.device("cuda", 0)


def photos(place: Path, **options: Any) -> Any:
    write_photos(place / "mine", count=48)
    return image_folder(place, "mine", image_size=16, test_share=0, decoder="nvjpeg", **options)


def test_a_file_has_the_same_bits_whatever_is_decoded_with_it(tmp_path: Path) -> None:
    splits = photos(tmp_path)
    loader = Loader(splits.train, splits.augmentation, seed=1, device=CUDA)
    ids = np.arange(48)
    together = loader.fetch(0, ids)[0]
    assert together.device == CUDA
    for part in (ids[:1], ids[5:9], ids[::-1][:20]):
        assert torch.equal(loader.fetch(0, part)[0], together[torch.from_numpy(part.copy()).cuda()])
    steps = [(0, np.split(ids, 6)) for _ in range(20)]
    for step in loader.stream(steps):
        assert torch.equal(torch.cat([inputs for inputs, _ in step]), together)


def test_memory_that_is_still_read_is_not_decoded_into(tmp_path: Path) -> None:
    """nvJPEG works on a stream of its own; the images of the last step may still be read on the loader's."""
    write_photos(tmp_path / "mine", count=64)
    whole = Loader(image_folder(tmp_path, "mine", 224, 0, augment=False, decoder="nvjpeg").train, device=CUDA)
    ids = np.arange(64)
    wanted = whole.fetch(0, ids)[0].double().sum()
    sums = [inputs.double().sum() for step in whole.stream([(0, [ids])] * 30) for inputs, _ in step]
    assert all(torch.equal(found, wanted) for found in sums)


def test_its_pixels_are_near_those_of_pillow(tmp_path: Path) -> None:
    ours = Loader(photos(tmp_path, augment=False).train, device=CUDA).fetch(0, np.arange(48))[0].cpu()
    pillow = image_folder(tmp_path, "mine", image_size=16, test_share=0, augment=False).train
    theirs = torch.stack([pillow[index][0] for index in range(48)])
    levels = (ours - theirs).abs().mean() * 255 * 0.225
    assert levels < 5, levels


def test_one_process_and_two_ranks_with_workers_have_one_digest(tmp_path: Path) -> None:
    write_photos(tmp_path / "mine", count=40)
    (tmp_path / "photographs.py").write_text(EXPERIMENT)
    ranks = ["--layout", "ddp", "--nproc-per-node", "2", "--backend", "gloo", "--workers", "2"]
    records = []
    for name, layout in (("alone", []), ("two", ranks)):
        words = ["--data-dir", str(tmp_path), "--device", "cuda", "--output", str(tmp_path / name), *layout]
        ended = ddp("train", str(tmp_path / "photographs.py"), *words, timeout=200)
        assert ended.code == 0, ended.output + ended.errors
        records.append(trained(tmp_path / name)[1])
    alone, two = records
    assert two["weights_sha256"] == alone["weights_sha256"]
    assert two["result"]["test_loss"] == alone["result"]["test_loss"]


def test_a_file_that_nvjpeg_cannot_decode_is_named(tmp_path: Path) -> None:
    splits = photos(tmp_path)
    Image.new("CMYK", (40, 40)).save(splits.files[7])
    with pytest.raises(UserError, match=f"{splits.files[7]} cannot be decoded by nvJPEG: "):
        Loader(splits.train, device=CUDA).fetch(0, np.arange(12))

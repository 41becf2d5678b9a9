"""JPEG files for a device that decodes: what the host reads, refuses and hands on. Pillow stands for nvJPEG."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.data import nvjpeg
from ddp_core.data.data_digest import changed_at
from ddp_core.data.image_folder import image_folder
from ddp_core.data.loader import Loader
from ddp_core.record.data import digest_data
from tests.core.data.test_image_folder import as_in_the_docs
from tests.support.commands import command


def by_pillow(encoded: list[torch.Tensor]) -> list[torch.Tensor]:
    """The images that Pillow decodes, in the place of nvJPEG; fails with the words of torchvision."""
    images = []
    for content in encoded:
        try:
            image = Image.open(io.BytesIO(content.numpy().tobytes())).convert("RGB")
        except Exception as error:
            raise RuntimeError("Error while decoding JPEG images: Failed to get image info: 3\nand a trace") from error
        images.append(torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous())
    return images


def write_photos(place: Path, count: int = 12) -> None:
    """Smooth JPEG files of few sizes, in two classes."""
    generator = np.random.default_rng(0)
    for number in range(count):
        file = place / "ab"[number % 2] / f"{number:02}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        small = Image.fromarray(generator.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        small.resize(((60, 40), (33, 57), (48, 48))[number % 3], Image.Resampling.BICUBIC).save(file, quality=95)


def test_a_file_has_the_same_pixels_whatever_others_are_decoded_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_photos(tmp_path / "mine")
    splits = image_folder(tmp_path, "mine", image_size=16, test_share=0, augment=False, decoder="nvjpeg")
    encoded, labels = splits.train.gather(range(12))  # type: ignore[attr-defined]
    assert labels.tolist() == [0] * 6 + [1] * 6
    together = nvjpeg.decoded(encoded, 18, by_pillow)
    monkeypatch.setattr(nvjpeg, "_FILES_AT_ONCE", 5)
    monkeypatch.setattr(nvjpeg, "_ELEMENTS_AT_ONCE", 1)
    assert torch.equal(nvjpeg.decoded(encoded, 18, by_pillow), together)
    pillow = image_folder(tmp_path, "mine", image_size=16, test_share=0, augment=False).train
    for index, path in enumerate(splits.files):
        torch.testing.assert_close(pillow[index][0], as_in_the_docs(path, 16))
        middle = together[index, :, 1:17, 1:17].float()
        # Where the square's middle falls between two pixels, Pillow cuts between them.
        assert (middle - pillow.gather([index])[0][0].float()).abs().mean() < 4  # type: ignore[attr-defined]


@pytest.mark.parametrize("damage", ["cut", "text", "empty", "gone", "no image"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_file_is_named(workers: int, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_photos(tmp_path / "mine")
    splits = image_folder(tmp_path, "mine", image_size=8, test_share=0, decoder="nvjpeg")
    broken = splits.files[4]
    content = broken.read_bytes()
    broken.unlink()
    if damage != "gone":
        found = {"cut": content[: len(content) // 2], "text": b"<html>404</html>", "no image": b"\xff\xd8\xff\xd9"}
        broken.write_bytes(found.get(damage, b""))
    monkeypatch.setattr(nvjpeg, "_by_nvjpeg", by_pillow)
    monkeypatch.setattr(type(splits.train), "device_type", None)
    with pytest.raises(
        UserError, match=f"{broken} cannot be {'read' if damage == 'gone' else 'decoded'}.*: "
    ) as failure:
        list(Loader(splits.train, workers=workers).stream([(0, [np.arange(9)])]))
    assert failure.value.exit_code == (ExitCode.RESOURCES if damage == "gone" else ExitCode.BAD_INPUT)
    assert "\n" not in str(failure.value)


def test_a_torchvision_without_nvjpeg_blames_no_file(tmp_path: Path) -> None:
    def missing(_: list[torch.Tensor]) -> list[torch.Tensor]:
        raise RuntimeError("decode_jpegs_cuda: torchvision not compiled with nvJPEG support\nand a trace")

    write_photos(tmp_path / "mine")
    splits = image_folder(tmp_path, "mine", test_share=0, decoder="nvjpeg")
    encoded, _ = splits.train.gather(range(4))  # type: ignore[attr-defined]
    with pytest.raises(
        UserError, match=r"^data image_folder: this torchvision cannot decode on a GPU \(decode_.*support\)"
    ):
        nvjpeg.decoded(encoded, 18, missing)


def test_the_decoder_belongs_to_the_datas_digest(tmp_path: Path) -> None:
    write_photos(tmp_path / "mine")
    pillow, other = (digest_data(image_folder(tmp_path, "mine", decoder=each)) for each in ("pillow", "nvjpeg"))
    assert changed_at(pillow, other) == "changed at (made by) (new)"


def test_only_jpeg_files_and_known_decoders_are_taken(tmp_path: Path) -> None:
    write_photos(tmp_path / "mine")
    with pytest.raises(UserError, match="decoder 'turbo' must be pillow or nvjpeg"):
        image_folder(tmp_path, "mine", decoder="turbo")  # type: ignore[arg-type]
    Image.new("RGB", (9, 9)).save(tmp_path / "mine" / "a" / "x.PNG")
    with pytest.raises(UserError, match=r"x.PNG is no JPEG file, and nvJPEG decodes no other; convert it, or"):
        image_folder(tmp_path, "mine", decoder="nvjpeg")


EXPERIMENT = '''"""Do files that the device decodes train?"""
from ddp_core.config.experiment import Component, Experiment

experiment = Experiment(
    name="photographs",
    model=Component(name="small_cnn", options={"width": 4, "image_size": 16, "channels": 3, "classes": 2}),
    data=Component(name="image_folder", options={"folder": "mine", "image_size": 16, "decoder": "nvjpeg"}),
    global_batch_size=6, micro_batch=3, epochs=2, reduction="exact",
)
'''


def test_a_cpu_is_told_that_a_gpu_must_decode(tmp_path: Path) -> None:
    write_photos(tmp_path / "mine")
    (tmp_path / "photographs.py").write_text(EXPERIMENT)
    words = ["--data-dir", tmp_path, "--device", "cpu", "--output", tmp_path / "outputs"]
    ended = command("train", tmp_path / "photographs.py", *words)
    assert ended.code == 2, ended.errors
    assert "its samples are finished on a cuda device, and this run is on cpu: --device cuda, or" in ended.errors
    assert "Traceback" not in ended.errors

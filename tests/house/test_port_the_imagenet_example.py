"""pytorch's imagenet example, ported in two ways, on tiny generated pictures: one digest on every number of ranks."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.commands import train

FOLDER = Path(__file__).parents[2] / "docs" / "tutorials" / "port-the-imagenet-example"
PAGE = FOLDER.with_suffix(".md").read_text()
FILE, DIFF = FOLDER / "imagenet.py", FOLDER / "main.diff"


def write_pictures(folder: Path) -> None:
    """Six and three pictures of each of three classes, below train and val."""
    generator = np.random.default_rng(0)
    for part, count in (("train", 6), ("val", 3)):
        for kind in range(3):
            (folder / part / str(kind)).mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 256, (*generator.integers(40, 60, 2), 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / str(kind) / f"{number}.jpg")


def test_the_page_shows_its_files() -> None:
    assert re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) == [FILE.read_text()]
    assert re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL) == [DIFF.read_text()]


@pytest.mark.slow
def test_the_experiment_ends_with_one_digest(tmp_path: Path) -> None:
    write_pictures(tmp_path / "imagenet")
    settings = {"data.size": 32, "model.arch": "squeezenet1_1", "model.classes": 3, "epochs": 2, "optimizer.lr": 0.001,
                "global_batch_size": 12, "micro_batch": 2}  # fmt: skip
    words = [FILE, "--data-dir", tmp_path]
    for name, value in settings.items():
        words += ["--set", f"{name}={value}"]
    alone = train(tmp_path / "alone", *words)
    three = train(tmp_path / "three", *words, "--workers", "1", ranks=3)
    assert three["weights_sha256"] == alone["weights_sha256"]
    assert alone["data"]["digest_of"].startswith("27 files")

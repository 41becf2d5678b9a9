"""pytorch's imagenet example, ported in two ways, on tiny generated pictures: one digest on every number of ranks."""

from __future__ import annotations

import hashlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ddp_core.base.torchvision_import import import_torchvision
from tests.support.commands import train
from tests.support.processes import run_processes

FOLDER = Path(__file__).parents[2] / "docs" / "tutorials" / "port-the-imagenet-example"
PAGE = FOLDER.with_suffix(".md").read_text()
FILE, DIFF = FOLDER / "imagenet.py", FOLDER / "main.diff"
OPTIONS = (
    "../pictures -a squeezenet1_1 -b 12 --micro-batches 6 --epochs 2 -j 0 --seed 0 --lr 0.001 --no-accel "
    "--dist-url env:// --dist-backend gloo"
)
THEIRS = os.environ.get("DDP_IMAGENET_EXAMPLE")
"""The path of pytorch/examples' imagenet/main.py, at the commit that the page names; it is no part of this project."""


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


def _run(rank: int, world_size: int, script: Path, folder: Path) -> str:
    """Train by the patched script; return the digest of the weights in its checkpoint."""
    os.chdir(folder)
    import_torchvision()
    sys.argv = [script.name, *OPTIONS.split()]
    runpy.run_path(str(script), run_name="__main__")
    if rank:
        return ""
    weights = torch.load("checkpoint.pth.tar")["state_dict"]
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in weights.values())).hexdigest()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(THEIRS is None, reason="needs DDP_IMAGENET_EXAMPLE, the path of pytorch's imagenet/main.py")
def test_the_patched_script_ends_with_one_digest(tmp_path: Path) -> None:
    assert THEIRS is not None
    script = tmp_path / "main.py"
    script.write_bytes(Path(THEIRS).read_bytes())
    subprocess.run(["patch", script, DIFF], check=True, stdout=subprocess.DEVNULL)
    write_pictures(tmp_path / "pictures")
    found = set()
    for ranks in (1, 2, 3):
        (tmp_path / str(ranks)).mkdir()
        found.add(run_processes(_run, ranks, script, tmp_path / str(ranks))[0])
    assert len(found) == 1

"""The scripts that pages show: they are the files beside the page, and end with one digest on every layout."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import runpy
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from ddp_core.data.loader import Loader
from tests.support.commands import ROOT, ddp, train, trained
from tests.support.layout_cases import digests
from tests.support.processes import run_processes

DOCS = ROOT / "docs"
PORTED, IMAGENET, GAN = (
    DOCS / each
    for each in (
        "tutorials/port-your-script",
        "tutorials/port-the-imagenet-example",
        "how-to/figures-and-losses-of-your-own",
    )
)
BEFORE, AFTER = ((PORTED / name).read_text().splitlines(keepends=True) for name in ("before.py", "after.py"))
RING, LOOP = GAN / "ring.py", GAN / "ring_loop.py"


def blocks(page: Path, language: str) -> list[str]:
    """The blocks of the page in this language."""
    return re.findall(rf"```{language}\n(.*?)```", page.with_suffix(".md").read_text(), re.DOTALL)


def test_pages_show_their_files() -> None:
    change = "".join(difflib.unified_diff(BEFORE, AFTER, "before.py", "after.py", n=1))
    for page, language, texts in (
        (PORTED, "python", ["".join(BEFORE), (PORTED / "evaluate.py").read_text()]),
        (PORTED, "diff", [change]),
        (IMAGENET, "python", [(IMAGENET / "imagenet.py").read_text()]),
    ):
        assert blocks(page, language) == texts, page
    assert all(part in (IMAGENET / "main.diff").read_text() for part in blocks(IMAGENET, "diff"))
    new = [line for line in difflib.ndiff(BEFORE, AFTER) if line.startswith("+ ") and line.strip() != "+"]
    assert len(new) == 14, "as the tutorial says"
    for part, file in zip(blocks(GAN, "py"), (RING, LOOP), strict=True):
        assert unindented(part) in unindented(file.read_text()), file


def unindented(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines())


_, DIMMED, PHOTOS = blocks(DOCS / "how-to" / "use-data", "python")


def more(samples: str, features: int) -> str:
    """What makes an experiment of a part of the page that takes images of 3 x 32 x 32."""
    return f"""
from ddp_core import Experiment, InMemory, Splits


def data():
    images = torch.rand(64, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return {samples}


def model():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear({features}, 4))


experiment = Experiment(name="photos", global_batch_size=16, micro_batch=4, epochs=3)
"""


EXPERIMENTS = {
    "dimmed": (DIMMED + more("Splits(InMemory(images, torch.arange(64) % 4), augmentation=dimming)", 3072), ""),
    "photos": (PHOTOS + more("Photos(images, torch.arange(64) % 4)", 1728), ""),
    "imagenet": (
        (IMAGENET / "imagenet.py").read_text(),
        "data.size=32 model.arch=squeezenet1_1 model.classes=3 epochs=4 optimizer.lr=0.001 "
        "global_batch_size=12 micro_batch=2",
    ),
    "ring": (RING.read_text(), "max_steps=8 data.size=320 last_batch=keep"),
}
"""The text of each experiment, and the settings with which it is small."""


def write_pictures(folder: Path) -> None:
    """Six and three pictures of each of three classes, below train and val."""
    generator = np.random.default_rng(0)
    for part, count in (("train", 6), ("val", 3)):
        for kind in range(3):
            (folder / part / str(kind)).mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 256, (*generator.integers(40, 60, 2), 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / str(kind) / f"{number}.jpg")


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_ends_with_one_digest_with_workers_on_ranks_and_after_a_kill(name: str, tmp_path: Path) -> None:
    text, settings = EXPERIMENTS[name]
    write_pictures(tmp_path / "imagenet")
    file = tmp_path / f"{name}.py"
    file.write_text(text)
    words = [str(file), "--data-dir", str(tmp_path), *(word for each in settings.split() for word in ("--set", each))]
    whole = train(tmp_path / "whole", *words)
    assert train(tmp_path / "two", *words, "--workers", "1", ranks=2)["weights_sha256"] == whole["weights_sha256"]
    assert whole["data_sha256"]  # reading twice gave the same
    killed = ddp("train", *words, "--device", "cpu", "--output", tmp_path / "killed", "--checkpoint-every", 2,
                 "--fault", "kill@3:0", "--max-restarts", 0)  # fmt: skip
    assert killed.code != 0
    train(tmp_path / "killed", *words, "--resume", "auto", "--workers", "2", ranks=3)
    assert trained(tmp_path / "killed")[1]["weights_sha256"] == whole["weights_sha256"]


def _script(rank: int, world_size: int, script: Path, folder: Path, words: list[str]) -> str:
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    sys.argv = [script.name, *words]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("error")  # none of it is deprecated, and the number of threads was chosen
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "steps", "stop"), [(PORTED / "after.py", 48, "25"), (LOOP, 44, "18")], ids=["after.py", "ring_loop.py"]
)
def test_a_script_ends_with_one_digest_also_when_resumed_on_other_ranks(
    script: Path, steps: int, stop: str, tmp_path: Path
) -> None:
    (expected,) = run_processes(_script, 1, script, tmp_path / "whole", [])
    assert expected.startswith(f"{steps} steps, ")
    assert run_processes(_script, 3, script, tmp_path / "stopped", [stop]) == ["", "", ""]
    assert run_processes(_script, 2, script, tmp_path / "stopped", []) == [expected, ""]


def _validate(rank: int, world_size: int) -> tuple[int, float]:
    evaluate = runpy.run_path(str(PORTED / "evaluate.py"))["evaluate"]
    dist.init_process_group("gloo")
    try:
        return evaluate(*model_and_samples())
    finally:
        dist.destroy_process_group()


def model_and_samples() -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    return model, TensorDataset(torch.rand(1003, 64), torch.arange(1003) % 10)  # batches of 99, and one of 13


def test_validation_on_all_ranks_counts_each_sample_once_and_has_the_same_bits() -> None:
    (alone,) = run_processes(_validate, 1)
    for ranks in (2, 3):
        assert run_processes(_validate, ranks) == [alone] * ranks
    model, samples = model_and_samples()
    images, targets = samples.tensors
    with torch.no_grad():
        outputs = model.eval()(images)
    assert alone[0] == (outputs.argmax(1) == targets).sum()
    assert alone[1] == pytest.approx(cross_entropy(outputs, targets).item())


PENALTY_IN_THE_LOSS = """
def forward(self, real):
    between = self.generator(torch.randn(len(real), self.noise))
    return {"between": between, "scores": self.critic(between)}


def loss(outputs, targets):
    (slope,) = torch.autograd.grad(outputs["scores"].sum(), outputs["between"], create_graph=True)
    return softplus(-outputs["scores"]).sum() + (slope.norm(dim=1) - 1).square().sum()


def data(size: int = 320):
    points = torch.randn(size, 2, generator=torch.Generator().manual_seed(0))
    return InMemory(points, torch.zeros(size))


Gan.forward = forward
experiment = Experiment(name="ring", optimizer=Component(name="optimizer"), global_batch_size=64, micro_batch=8)
"""


@pytest.mark.slow
def test_one_experiment_with_two_losses_and_a_penalty_ends_alike_on_every_layout(tmp_path: Path) -> None:
    own = tmp_path / "penalty_in_the_loss.py"
    own.write_text(RING.read_text().split("def metrics")[0] + PENALTY_IN_THE_LOSS)
    short = ["--set", "max_steps=5", "--set", "data.size=320", "--set", "last_batch=keep"]
    cases = {"in the loss": [str(own), *short], "bf16": [str(RING), *short, "--set", "precision=bf16"]}
    expected = digests(cases, tmp_path / "single", "single", 1)
    assert digests(cases, tmp_path / "dp", "dp", 2) == expected
    for ranks in (2, 3):
        for shard in ("none", "optimizer", "gradients"):
            assert digests(cases, tmp_path / f"{shard}-{ranks}", "ddp", ranks, shard=shard) == expected, shard
    refused = ddp("train", *cases.pop("in the loss"), "--layout", "ddp", "--nproc-per-node", 2, "--device", "cpu",
                  "--shard", "parameters", "--output", tmp_path / "refused")  # fmt: skip
    assert refused.code == 2
    assert "in the model's forward, not in the loss" in refused.errors
    del expected["in the loss"]
    for ranks in (2, 3):
        assert digests(cases, tmp_path / f"parameters-{ranks}", "ddp", ranks, shard="parameters") == expected


class TellsItsEpoch:
    """Samples that are the epoch that the data set was told."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[float, int]:
        return float(self.epoch), index


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_set_is_told_the_epoch_of_each_micro_batch_in_whichever_process_fetches_it(workers: int) -> None:
    loader = Loader(TellsItsEpoch(), workers=workers)
    asked = [(epoch, [torch.arange(4).numpy(), torch.arange(4, 8).numpy()]) for epoch in (0, 1, 5, 2)]
    found = [{row for inputs, _ in step for row in inputs.tolist()} for step in loader.stream(asked)]
    assert found == [{0.0}, {1.0}, {5.0}, {2.0}]

"""The page of GANs: its files are shown as they are, and end with one digest on every layout, also when continued."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.support.commands import ddp, train, trained
from tests.support.layout_cases import digests
from tests.support.processes import run_processes

ROOT = Path(__file__).parents[2]
FILES = ROOT / "docs" / "how-to" / "train-a-gan"
PAGE = FILES.with_suffix(".md").read_text()
RING, LOOP = FILES / "ring.py", FILES / "ring_loop.py"
SHORT = [str(RING), "--set", "max_steps=5", "--set", "data.size=320", "--set", "last_batch=keep"]
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


def test_the_page_shows_its_files() -> None:
    assert re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) == [RING.read_text(), LOOP.read_text()]


@pytest.mark.slow
def test_one_experiment_with_two_losses_and_a_penalty_ends_alike_on_every_layout(tmp_path: Path) -> None:
    own = tmp_path / "penalty_in_the_loss.py"
    own.write_text(RING.read_text().split("def metrics")[0] + PENALTY_IN_THE_LOSS)
    cases = {"in the loss": [str(own), *SHORT[1:]], "ring": SHORT, "bf16": [*SHORT, "--set", "precision=bf16"]}
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


@pytest.mark.slow
def test_whose_turn_it_is_survives_a_kill(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", *SHORT)
    killed = ddp("train", *SHORT, "--device", "cpu", "--output", tmp_path / "killed", "--checkpoint-every", 3,
                 "--fault", "kill@4:0", "--max-restarts", 0)  # fmt: skip
    assert killed.code != 0
    train(tmp_path / "killed", *SHORT, "--resume", "auto", ranks=3)
    assert trained(tmp_path / "killed")[1]["weights_sha256"] == whole["weights_sha256"]


def _loop(rank: int, world_size: int, folder: Path, words: list[str]) -> str:
    os.chdir(folder)
    sys.argv = [LOOP.name, *words]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(LOOP), run_name="__main__")
    return printed.getvalue()


@pytest.mark.slow
def test_the_loop_with_two_optimizers_ends_alike_also_when_continued_on_other_ranks(tmp_path: Path) -> None:
    for name in ("whole", "two", "stopped"):
        (tmp_path / name).mkdir()
    (expected,) = run_processes(_loop, 1, tmp_path / "whole", [])
    assert expected.startswith("44 steps, ")
    assert run_processes(_loop, 2, tmp_path / "two", []) == [expected, ""]
    assert run_processes(_loop, 3, tmp_path / "stopped", ["18"]) == ["", "", ""]
    assert run_processes(_loop, 2, tmp_path / "stopped", []) == [expected, ""]

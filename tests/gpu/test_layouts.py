"""One digest on every layout of a GPU machine, through the command line; ranks without a GPU of their own share one."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from ddp_core.config.layout import SHARD_MODES
from tests.support.commands import ROOT, command, ddp, trained

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

PRECISIONS = ["fp32", "tf32", "bf16", "fp16"]
LAYOUTS = [
    *(["--layout", kind, "--nproc-per-node", str(count)] for kind in ("dp", "ddp") for count in (1, 2, 3, 4)),
    *(["--layout", "ddp", "--nproc-per-node", "2", "--shard", mode] for mode in SHARD_MODES),
]


def digests(output: Path, *words: str) -> tuple[Any, ...]:
    """Of weights and optimizer after twelve steps of the digits' network, which has dropout; and the figures."""
    settings = ["--set", "max_steps=12", "--device", "cuda", "--output", str(output)]
    ended = ddp("train", "digits", *settings, *words, timeout=300)
    assert ended.code == 0, ended.output + ended.errors
    record = trained(output)[1]
    figures = (record["result"][name] for name in ("test_loss", "test_accuracy"))
    return (record["weights_sha256"], record["optimizer_sha256"], *figures)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_three_runs_and_every_layout_have_one_digest(precision: str, tmp_path: Path) -> None:
    words = ["--set", f"precision={precision}"]
    found = {f"single, run {turn}": digests(tmp_path / f"single-{turn}", *words) for turn in range(3)}
    found |= {name: digests(tmp_path / name, *words, *layout) for layout in LAYOUTS if (name := " ".join(layout))}
    assert len(set(found.values())) == 1, found


def test_a_run_killed_after_any_step_ends_with_the_same_digest(tmp_path: Path) -> None:
    steps = 8
    wanted = digests(tmp_path / "whole", "--set", f"max_steps={steps}")
    for step in range(1, steps):
        output = tmp_path / f"killed-{step}"
        common = ["--set", f"max_steps={steps}", "--device", "cuda", "--output", str(output)]
        words = ["train", "digits", *common, "--checkpoint-every", "1", "--max-restarts", "0"]
        killed = ddp(*words, "--layout", "ddp", "--nproc-per-node", "2", "--fault", f"kill@{step}:1", timeout=300)
        assert killed.code == 6, killed.output + killed.errors
        resumed = ddp(*words, "--resume", "auto", timeout=300)
        assert resumed.code == 0, resumed.output + resumed.errors
        record = trained(output)[1]
        assert (record["weights_sha256"], record["optimizer_sha256"]) == wanted[:2], step


def test_other_memory_pressure_changes_no_bit(tmp_path: Path) -> None:
    """cuDNN may choose another algorithm where its workspace does not fit."""
    import torch

    wanted = digests(tmp_path / "free")
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(max(0, free - 3 * 2**30), dtype=torch.uint8, device="cuda")
    assert digests(tmp_path / "full") == wanted
    del hog
    torch.cuda.empty_cache()


SMALL = [
    word
    for setting in ("data.image_size=64", "data.samples=256", "data.pool=64", "global_batch_size=64", "max_steps=4")
    for word in ("--set", setting)
]


def lines() -> list[list[str]]:
    """The words of each `ddp train` on the page, without `ddp`."""
    page = (ROOT / "docs" / "how-to" / "train-on-gpus.md").read_text()
    return [shlex.split(line) for line in re.findall(r"^ddp (train .*)$", page, re.MULTILINE)]


@pytest.mark.parametrize("words", lines(), ids=" ".join)
def test_the_pages_commands_train(words: list[str], tmp_path: Path) -> None:
    ended = command(*words, *SMALL, "--device", "cuda", "--output", tmp_path)
    assert ended.code == 0, ended.output + ended.errors

"""One digest on every layout of a GPU machine, through the command line; ranks without a GPU of their own share one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_core.config.layout import SHARD_MODES
from tests.support.commands import command, ddp, trained

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

PRECISIONS = ["fp32", "tf32", "bf16"]
LAYOUTS = {
    "ddp x 1": ["--layout", "ddp", "--nproc-per-node", "1"],
    "ddp x 2": ["--layout", "ddp", "--nproc-per-node", "2"],
    "ddp x 4": ["--layout", "ddp", "--nproc-per-node", "4"],
    "dp x 1": ["--layout", "dp", "--nproc-per-node", "1"],
    "dp x 2": ["--layout", "dp", "--nproc-per-node", "2"],
} | {f"ddp x 2, --shard {mode}": ["--layout", "ddp", "--nproc-per-node", "2", "--shard", mode] for mode in SHARD_MODES}


def digest(output: Path, *words: str) -> str:
    """The digest of the weights after twelve steps of the digits' convolutional network, with dropout."""
    settings = ["--set", "max_steps=12", "--device", "cuda", "--output", str(output)]
    ended = ddp("train", "digits", *settings, *words, timeout=300)
    assert ended.code == 0, ended.output + ended.errors
    found: str = trained(output)[1]["weights_sha256"]
    return found


@pytest.mark.parametrize("precision", PRECISIONS)
def test_three_runs_and_every_layout_have_one_digest(precision: str, tmp_path: Path) -> None:
    words = ["--set", f"precision={precision}"]
    digests = {f"single, run {turn}": digest(tmp_path / f"single-{turn}", *words) for turn in range(3)}
    digests |= {name: digest(tmp_path / name, *words, *layout) for name, layout in LAYOUTS.items()}
    assert len(set(digests.values())) == 1, digests


def test_a_run_killed_after_any_step_ends_with_the_same_digest(tmp_path: Path) -> None:
    steps = 8
    wanted = digest(tmp_path / "whole", "--set", f"max_steps={steps}")
    for step in range(1, steps):
        output = tmp_path / f"killed-{step}"
        common = ["--set", f"max_steps={steps}", "--device", "cuda", "--output", str(output)]
        words = ["train", "digits", *common, "--checkpoint-every", "1", "--max-restarts", "0"]
        killed = ddp(*words, "--layout", "ddp", "--nproc-per-node", "2", "--fault", f"kill@{step}:1", timeout=300)
        assert killed.code == 6, killed.output + killed.errors
        resumed = ddp(*words, "--resume", "auto", timeout=300)
        assert resumed.code == 0, resumed.output + resumed.errors
        assert trained(output)[1]["weights_sha256"] == wanted, step


def test_other_memory_pressure_changes_no_bit(tmp_path: Path) -> None:
    """cuDNN may choose another algorithm where its workspace does not fit."""
    import torch

    wanted = digest(tmp_path / "free")
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(max(0, free - 3 * 2**30), dtype=torch.uint8, device="cuda")
    assert digest(tmp_path / "full") == wanted
    del hog
    torch.cuda.empty_cache()


@pytest.mark.timeout(1200)
def test_verify_layouts_proves_it(tmp_path: Path) -> None:
    ended = command("verify-layouts", "toy_mlp", "--device", "cuda", timeout=1100)
    assert ended.code == 0, ended.output + ended.errors
    assert ended.output.endswith(": identical\n")

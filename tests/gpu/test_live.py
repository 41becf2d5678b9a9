"""A live recovery on GPUs: ranks are killed, the others go on over NCCL, and the bits are those of one process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.faults.test_live import KEPT, STRUCK, Ends, check_live, ends_of
from tests.support.commands import command

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """How `struck` ends after its steps, trained by one process on one GPU."""
    output = tmp_path_factory.mktemp("alone")
    words = ["--log-every", "1", "--device", "cuda", "--output", str(output)]
    ended = command("train", STRUCK, *KEPT, *words, timeout=300)
    assert ended.code == 0, ended.errors
    return ends_of(output)


def check(output: Path, ends: Ends, kills: list[str], ranks: int) -> None:
    live = ["--layout", "ddp", "--nproc-per-node", str(ranks), "--recovery", "live", "--timeout", "60"]
    files = ["--checkpoint-every", "4", "--log-every", "1", "--output", str(output)]
    env = {"STRUCK_KILLS": ",".join(kills)}
    ended = command("train", STRUCK, *KEPT, "--device", "cuda", *live, *files, env=env, timeout=500)
    check_live(output, ended, ends, kills)


@pytest.mark.gpu2
@pytest.mark.parametrize(
    "kills",
    [
        ["1.0 forward 20"],
        ["1.0 backward 22"],
        ["1.0 update 10"],
        ["0.0 backward 22"],
        ["1.0 exchange 11"],
        ["0.0 exchange 11"],
        ["0.0 updated 16"],
        ["1.0 evaluation 5"],
        ["0.0 save 3"],
        ["1.0 later 31"],
        ["0.0 backward 10", "1.0 backward 30"],
        ["1.0 update 10", "1.1 forward 1"],
    ],
    ids=", ".join,
)
def test_the_others_go_on_over_nccl(tmp_path: Path, ends: Ends, kills: list[str]) -> None:
    check(tmp_path, ends, kills, min(torch.cuda.device_count(), 6))


@pytest.mark.gpu2
def test_they_still_live_when_the_watchdog_would_have_ended_them(tmp_path: Path, ends: Ends) -> None:
    """By default the watchdog ends a process a minute after a collective has failed in it."""
    os.environ["STRUCK_PAUSE"] = "4"
    try:
        check(tmp_path, ends, ["1.0 exchange 5"], min(torch.cuda.device_count(), 6))
    finally:
        del os.environ["STRUCK_PAUSE"]


def test_ranks_that_share_a_gpu_go_on(tmp_path: Path, ends: Ends) -> None:
    check(tmp_path, ends, ["1.0 backward 22"], torch.cuda.device_count() + 2)

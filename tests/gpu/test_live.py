"""A live recovery on GPUs: ranks are killed, the others go on over NCCL, and the bits are those of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.faults.scenarios import Scenario, on
from tests.faults.test_live import Ends, check_live, ends_alone, train

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]
IN_TIME = ("--timeout", "60")


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """How `struck` ends after its steps, trained by one process on one GPU."""
    return ends_alone(tmp_path_factory.mktemp("alone"), "cuda")


def a_rank_on_each() -> int:
    return min(torch.cuda.device_count(), 6)


@pytest.mark.gpu2
@pytest.mark.parametrize("scenario", on("gpu"))
def test_the_others_go_on_over_nccl(tmp_path: Path, ends: Ends, scenario: Scenario) -> None:
    ended = train(tmp_path, scenario.kills, *IN_TIME, device="cuda", ranks=a_rank_on_each())
    check_live(tmp_path, ended, ends, scenario.kills)


@pytest.mark.gpu2
def test_they_still_live_when_the_watchdog_would_have_ended_them(tmp_path: Path, ends: Ends) -> None:
    """By default the watchdog ends a process a minute after a collective has failed in it."""
    kills, slowly = ["1.0 exchange 5"], {"STRUCK_PAUSE": "4"}
    ended = train(tmp_path, kills, *IN_TIME, device="cuda", ranks=a_rank_on_each(), env=slowly)
    check_live(tmp_path, ended, ends, kills)


def test_ranks_that_share_a_gpu_go_on(tmp_path: Path, ends: Ends) -> None:
    kills = ["1.0 backward 22"]
    ended = train(tmp_path, kills, *IN_TIME, device="cuda", ranks=torch.cuda.device_count() + 2)
    check_live(tmp_path, ended, ends, kills)

"""A live recovery on devices that are played, where NCCL tells the host nothing of a lost peer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.scenarios import Scenario, on
from tests.faults.test_live import Ends, check_live, ends_alone, train
from tests.support.standin_cuda import environment
from tests.support.standin_cuda.lost_peers import VARIABLE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """How `struck` ends after its steps, trained by one process on one device."""
    return ends_alone(tmp_path_factory.mktemp("alone"), "cuda", environment())


@pytest.mark.parametrize(
    ("scenario", "left"),
    [
        pytest.param(*each.values, left, id=f"{each.id} {left}")
        for left in ("", "rubbish", "turns")
        for each in on(f"stand_in_{left}".removesuffix("_"))
    ],
)
def test_the_others_go_on(tmp_path: Path, ends: Ends, scenario: Scenario, left: str) -> None:
    """`left` is what DDP_STANDIN_NCCL says of a message that never comes."""
    env = environment(3) | {VARIABLE: left}
    check_live(tmp_path, train(tmp_path, scenario.kills, device="cuda", env=env), ends, scenario.kills)


def test_ranks_that_share_a_device_go_on(tmp_path: Path, ends: Ends) -> None:
    kills = ["1.0 backward 22"]
    check_live(tmp_path, train(tmp_path, kills, device="cuda", env=environment(1) | {VARIABLE: ""}), ends, kills)

"""A live recovery on devices that are played, where NCCL tells the host nothing of a lost peer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults.test_live import KEPT, STRUCK, Ends, check_live, ends_of
from tests.support.commands import Ended, ddp
from tests.support.processes import HANG
from tests.support.standin_cuda import environment
from tests.support.standin_cuda.lost_peers import VARIABLE

EACH = ("--log-every", "1")
"""Callbacks are told of each loss, also in one process."""


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """How `struck` ends after its steps, trained by one process on one device."""
    output = tmp_path_factory.mktemp("alone")
    ended = ddp("train", STRUCK, *KEPT, *EACH, "--device", "cuda", "--output", output, env=environment())
    assert ended.code == 0, ended.errors
    return ends_of(output)


def train(output: Path, kills: Sequence[str], devices: int = 3, left: str = "") -> Ended:
    """Train `struck` on three ranks; `left` is what DDP_STANDIN_NCCL says of a message that never comes."""
    live = ["--layout", "ddp", "--nproc-per-node", "3", "--recovery", "live", "--timeout", "20"]
    files = ["--checkpoint-every", "4", *EACH, "--output", output]
    env = environment(devices) | {"STRUCK_KILLS": ",".join(kills), VARIABLE: left}
    return ddp("train", STRUCK, *KEPT, "--device", "cuda", *live, *files, env=env, timeout=HANG)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "left"),
    [
        # The peers have had all that goes over gloo. First nothing but the launcher's word wakes them; at the second
        # loss NCCL's kernels end on rubbish, as if all were well. After each loss a process counts anew.
        pytest.param(["2.0 exchange 5", "1.0 exchange 8"], "turns", id="in-an-exchange"),
        pytest.param(["0.0 exchange 11"], "", id="rank-0-in-an-exchange", marks=pytest.mark.slow),
        pytest.param(["0.0 exchange 11"], "rubbish", id="rank-0-and-others-abort-first", marks=pytest.mark.slow),
        pytest.param(["1.0 backward 22"], "rubbish", id="in-backward", marks=pytest.mark.slow),
        pytest.param(["0.0 update 10"], "", id="rank-0-in-the-update", marks=pytest.mark.slow),
        pytest.param(["2.0 evaluation 5"], "", id="in-an-evaluation", marks=pytest.mark.slow),
        pytest.param(["0.0 save 3"], "", id="in-a-save", marks=pytest.mark.slow),
        pytest.param(["1.0 later 31"], "", id="at-any-moment", marks=pytest.mark.slow),
        pytest.param(["2.0 update 5", "1.0 exchange 8"], "rubbish", id="two", marks=pytest.mark.slow),
    ],
)
def test_the_others_go_on(tmp_path: Path, ends: Ends, kills: list[str], left: str) -> None:
    check_live(tmp_path, train(tmp_path, kills, left=left), ends, kills)


@pytest.mark.slow
def test_ranks_that_share_a_device_go_on(tmp_path: Path, ends: Ends) -> None:
    kills = ["1.0 backward 22"]
    check_live(tmp_path, train(tmp_path, kills, devices=1), ends, kills)

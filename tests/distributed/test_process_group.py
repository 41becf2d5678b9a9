"""What ranks tell each other, and the message when a rank is missing, started twice, or different."""

from __future__ import annotations

import math
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.distributed.process_group import process_group
from ddp_core.distributed.world import World
from tests.faults.matrix import LATE, record_row
from tests.support.processes import free_port, run_processes

CPU = torch.device("cpu")


def _talk(rank: int, world_size: int) -> dict[str, Any]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with process_group(World.from_environment(), CPU, 20) as collectives:
        started = collectives.start_sum(tensor := torch.full((2,), float(rank)))
        assert started is not None
        started.wait()
        table = torch.zeros(world_size, dtype=torch.float64)
        table[rank] = 1 / 3 + rank
        said = {
            "broadcast": collectives.broadcast({"from": rank}),
            "gather": collectives.gather(("rank", rank)),
            "sum": tensor.tolist(),
            "table": collectives.sum_(table).tolist(),
            "nan": math.isnan(collectives.sum_(torch.tensor([math.nan if rank == 1 else 0.0])).item()),
        }
        collectives.barrier()
    said["ended"] = not dist.is_initialized()
    return said


def test_ranks_tell_each_other() -> None:
    for said in run_processes(_talk, 3):
        assert said["broadcast"] == {"from": 0}
        assert said["gather"] == [("rank", 0), ("rank", 1), ("rank", 2)]
        assert said["sum"] == [3.0, 3.0]
        assert said["table"] == [1 / 3, 1 / 3 + 1, 1 / 3 + 2], "one giver per element: no rounding"
        assert said["nan"]
        assert said["ended"]


def _with_a_mistake(rank: int, world_size: int, mistake: str) -> tuple[str, int, float]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if mistake == "missing":
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = "3"
    elif mistake == "twice":
        os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = "3"
        os.environ["RANK"] = "0" if rank == 0 else "1"
    elif mistake == "interface":
        os.environ["GLOO_SOCKET_IFNAME"] = "eth77"
    started = time.monotonic()
    try:
        with process_group(World.from_environment(), CPU, 2):
            pass
    except UserError as error:
        return str(error), int(error.exit_code), time.monotonic() - started
    return "nothing", 0, 0.0


def test_a_missing_rank_is_named_within_the_timeout() -> None:
    answers = run_processes(_with_a_mistake, 2, "missing")
    assert "rank 2 of 3 did not come" in answers[0][0]
    for message, code, seconds in answers:
        assert "of 3 did not come within 2 s" in message
        assert code == ExitCode.PEERS_LOST
        assert seconds < 60, "torch alone would wait for minutes"
    latest = max(seconds for _, _, seconds in answers)
    record_row(26, f"6 on those that came, '{answers[0][0].partition(': ')[2].partition(':')[0]}'", {LATE: latest - 2})


def test_a_rank_that_is_there_twice_is_named() -> None:
    answers = run_processes(_with_a_mistake, 3, "twice")
    [said] = {message for message, code, _ in answers if code == ExitCode.BAD_INPUT}
    assert "rank 1 was started twice" in said
    record_row(26, "2, 'rank 1 was started twice', with MASTER_ADDR and MASTER_PORT")


def test_an_interface_that_does_not_exist_is_named_with_those_that_do() -> None:
    for message, code, seconds in run_processes(_with_a_mistake, 2, "interface"):
        assert "GLOO_SOCKET_IFNAME=eth77" in message
        assert "lo" in message
        assert code == ExitCode.BAD_INPUT
        assert seconds < 60
    record_row(
        25, "2, 'GLOO_SOCKET_IFNAME=eth77: no such network interface; there are: …'", {"asked for a group": seconds}
    )


@pytest.mark.slow
def test_no_first_rank_is_said_within_the_timeout() -> None:
    world = World(1, 2, local_rank=1, nproc_per_node=2, store_host="127.0.0.1", store_port=free_port())
    started = time.monotonic()
    with pytest.raises(UserError, match="its store is unreachable") as raised, process_group(world, CPU, 1):
        pass
    assert raised.value.exit_code == ExitCode.PEERS_LOST
    assert time.monotonic() - started < 60

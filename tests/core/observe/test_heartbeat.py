"""How old a heartbeat is, no wall clock decides: it may be set back or forward, here and on other machines.

And which rank is lost, by heartbeats and the words of an error.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from ddp_core.base.platforms import boot_id
from ddp_core.distributed.world import World
from ddp_core.observe import heartbeat
from ddp_core.observe.heartbeat import Heartbeat, check_health, name_lost_peer, read_heartbeats, renew_heartbeat
from ddp_core.observe.step import StepBatch
from tests.support.wording import refusing

TWO_DAYS = 2 * 86400.0
GONE = 2**31 - 1
"""The id of no process."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "digits" / "a-run"
    run.mkdir(parents=True)
    return run


def beat(run: Path, rank: int, age: float = 0.0, **fields: object) -> Path:
    """The file of a heartbeat that was written `age` seconds ago, by the clocks of this machine but for `fields`."""
    known = {"rank": rank, "node_rank": rank, "host": socket.gethostname(), "address": "10.0.0.1", "pid": os.getpid()}
    clocks = {"time": time.time() - age, "boot": boot_id(), "monotonic": time.monotonic() - age}
    path = run / "heartbeats" / f"rank-{rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known | {"step": 7} | clocks | fields))
    return path


@pytest.mark.parametrize("shift", [-TWO_DAYS, TWO_DAYS])
def test_a_clock_that_is_set_stops_no_heartbeat(run: Path, shift: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_BEAT_SECONDS", 0.0)
    now = time.time
    beats = Heartbeat(run, World(0, 1))
    monkeypatch.setattr(time, "time", lambda: now() + shift)
    for step in range(40):
        beats.after_step(StepBatch(step, 0, 4, 4, [], [], []))
    [last] = read_heartbeats(run)
    assert (last["step"], last["sequence"]) == (40, 40)
    assert abs(last["time"] - now() - shift) < 60
    assert check_health(run.parent.parent, 60).startswith("rank 0 at step 40, 0 s ago")
    renew_heartbeat(run, World(0, 1))
    assert read_heartbeats(run)[0]["sequence"] == 41


def test_a_heartbeat_comes_once_a_second_at_most(run: Path) -> None:
    beats = Heartbeat(run, World(0, 1))
    began = time.monotonic()
    beats.after_step(StepBatch(0, 0, 4, 4, [], [], []))
    if time.monotonic() - began < 0.5:
        assert read_heartbeats(run)[0]["sequence"] == 0


@pytest.mark.parametrize("shift", [-TWO_DAYS, 0.0, TWO_DAYS])
def test_a_rank_that_hangs_is_unhealthy_whatever_the_wall_clock_says(run: Path, shift: float) -> None:
    beat(run, 0, age=100, time=time.time() + shift)
    with refusing():
        check_health(run.parent.parent, 60)
    beat(run, 1, age=3, time=time.time() + shift)
    assert check_health(run.parent.parent, 60) == "rank 1 at step 7, 3 s ago"


@pytest.mark.parametrize("other", [{"boot": "before"}, {"host": "elsewhere"}, {"pid": GONE}])
def test_a_heartbeat_of_another_machine_or_from_before_the_start_of_this_one_or_of_an_ended_process_is_none_of_this(
    run: Path, other: dict[str, Any]
) -> None:
    beat(run, 0, age=100, **other)
    assert check_health(run.parent.parent, 60) == "no rank of this host trains now"


@pytest.mark.parametrize("shift", [-TWO_DAYS, TWO_DAYS])
def test_a_rank_of_another_machine_is_silent_by_the_clock_of_the_file_system(run: Path, shift: float) -> None:
    there = {"host": "elsewhere", "boot": "another", "monotonic": 5.0, "time": time.time() + shift}
    files = [beat(run, rank, 0, **there) for rank in (1, 2)]
    assert name_lost_peer(run, World(0, 3), "timed out") == "a peer"
    for file, age in zip(files, (1, 30), strict=True):
        os.utime(file, (time.time() + shift, file.stat().st_mtime - age))
    assert name_lost_peer(run, World(0, 3), "timed out") == "rank 2 (node 2), silent for 30 s since step 7,"


def test_an_age_that_cannot_be_known_names_nobody(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError

    beat(run, 1, 0, host="elsewhere", boot="another")
    monkeypatch.setattr(heartbeat.tempfile, "TemporaryFile", refuse)
    assert name_lost_peer(run, World(0, 2), "timed out") == "a peer"


def test_a_dead_process_of_this_host_is_named(run: Path) -> None:
    beat(run, 1, pid=GONE)
    beat(run, 2)
    assert name_lost_peer(run, World(0, 3), "Connection reset") == "rank 1 (node 1), which is dead,"


def test_one_that_noticed_the_loss_and_left_is_not_named(run: Path) -> None:
    for rank in (1, 2):
        beat(run, rank, pid=GONE)
    renew_heartbeat(run, World(2, 3))
    assert name_lost_peer(run, World(0, 3), "Connection reset") == "rank 1 (node 1), which is dead,"


def test_the_one_at_the_address_of_the_error_is_named(run: Path) -> None:
    for rank in (1, 2):
        beat(run, rank, host="elsewhere", address=f"10.0.0.{rank}")
    assert name_lost_peer(run, World(0, 3), "Read error [10.0.0.2]:5002: reset") == "rank 2 (node 2)"
    assert name_lost_peer(run, World(0, 3), "no address") == "a peer"

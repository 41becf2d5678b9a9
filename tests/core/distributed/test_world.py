"""A process's rank and world: the launcher's variables, read in one place and checked."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from ddp_core.base.errors import UserError
from ddp_core.distributed.world import World, free_port
from tests.support.wording import refusing

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "launch-7",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def test_without_a_launcher_there_is_one_process() -> None:
    world = World.from_environment({})
    assert world == World()
    assert (world.rank, world.world_size, world.nnodes, world.is_first, world.launch_id) == (0, 1, 1, True, None)
    assert not World.is_set({"RANK": "0"})
    assert World.from_environment({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "nonsense"}) == world
    assert World.from_environment(world.to_environment()) == world


def test_torchruns_variables_are_read() -> None:
    world = World.from_environment(TORCHRUN)
    assert (world.rank, world.world_size, world.local_rank, world.nproc_per_node) == (5, 8, 1, 4)
    assert (world.nnodes, world.node_rank, world.launch_id, world.restart_count) == (2, 1, "launch-7", 2)
    assert (world.store_host, world.store_port, world.agent_serves_store) == ("10.0.0.1", 29500, False)
    assert not world.is_first
    assert world.place == "rank 5 (node 1)"
    assert World.from_environment(TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}).launch_id is None
    least = World.from_environment({"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"})
    assert (least.local_rank, least.nproc_per_node, least.node_rank, least.nnodes) == (2, 3, 0, 1)


@pytest.mark.parametrize(
    "change",
    [
        *("RANK=first", "WORLD_SIZE=", "RANK=8", "RANK=-1", "LOCAL_WORLD_SIZE=3", "LOCAL_WORLD_SIZE=0"),
        *("MASTER_PORT", "MASTER_ADDR", "MASTER_PORT=http", "LOCAL_RANK=one"),
    ],
)
def test_a_wrong_variable_is_named(change: str) -> None:
    name, is_set, value = change.partition("=")
    environ = {**TORCHRUN, name: value}
    if not is_set:
        del environ[name]
    with refusing():
        World.from_environment(environ)


@pytest.mark.parametrize("change", [{}, {"TORCHELASTIC_USE_AGENT_STORE": "True"}, {"DDP_REPORT_DIR": "/reports"}])
def test_what_is_written_is_read_back(change: dict[str, str]) -> None:
    """torchrun's variables, as `World` writes them, are the ones that it reads."""
    assert World.from_environment(TORCHRUN | change).to_environment() == TORCHRUN | change


def test_a_free_port_is_none_that_the_system_gives_to_a_connection_meanwhile() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(free_port() < first for _ in range(20))


def test_a_port_that_is_taken_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = free_port()
    other = next(port for port in iter(free_port, 0) if port != taken)
    monkeypatch.setattr("ddp_core.distributed.world._PORTS", (taken, other))
    with socket.socket() as listens:
        listens.bind(("127.0.0.1", taken))
        listens.listen()
        assert {free_port() for _ in range(20)} == {other}
        monkeypatch.setattr("ddp_core.distributed.world._PORTS", (taken,))
        with pytest.raises(UserError, match=f"no free port between {taken} and {taken}"):
            free_port()

"""A process's rank and world: the launcher's variables, read in one place and checked."""

from __future__ import annotations

import ast
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddp_core
from ddp_core.base.errors import UserError
from ddp_core.distributed.world import World, free_port

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
READERS = ("distributed/world.py", "distributed/launchers.py")
LAUNCHERS_VARIABLES = {
    *TORCHRUN,
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "TORCHELASTIC_USE_AGENT_STORE",
    "DDP_REPORT_DIR",
}


def test_without_a_launcher_there_is_one_process() -> None:
    world = World.from_environment({})
    assert world == World()
    assert (world.rank, world.world_size, world.nnodes, world.is_first, world.launch_id) == (0, 1, 1, True, None)
    assert not World.is_set({"RANK": "0"})


def test_torchruns_variables_are_read() -> None:
    world = World.from_environment(TORCHRUN)
    assert (world.rank, world.world_size, world.local_rank, world.nproc_per_node) == (5, 8, 1, 4)
    assert (world.nnodes, world.node_rank, world.launch_id, world.restart_count) == (2, 1, "launch-7", 2)
    assert (world.store_host, world.store_port, world.agent_serves_store) == ("10.0.0.1", 29500, False)
    assert not world.is_first
    assert world.place == "rank 5 (node 1)"


def test_a_scheduler_may_set_the_least() -> None:
    world = World.from_environment({"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"})
    assert (world.local_rank, world.nproc_per_node, world.node_rank, world.nnodes) == (2, 3, 0, 1)


def test_torchruns_default_identity_is_none() -> None:
    assert World.from_environment(TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}).launch_id is None


def test_a_report_directory_is_read(tmp_path: Path) -> None:
    assert World.from_environment(TORCHRUN | {"DDP_REPORT_DIR": str(tmp_path)}).report_dir == tmp_path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"RANK": "first"}, ["RANK='first'", "torchrun"]),
        ({"WORLD_SIZE": ""}, ["WORLD_SIZE=''"]),
        ({"RANK": "8"}, ["RANK=8", "WORLD_SIZE=8"]),
        ({"RANK": "-1"}, ["RANK=-1"]),
        ({"LOCAL_WORLD_SIZE": "3"}, ["WORLD_SIZE=8", "LOCAL_WORLD_SIZE=3"]),
        ({"LOCAL_WORLD_SIZE": "0"}, ["LOCAL_WORLD_SIZE=0"]),
        ({"MASTER_PORT": None}, ["MASTER_PORT"]),
        ({"MASTER_ADDR": None}, ["MASTER_ADDR"]),
        ({"MASTER_PORT": "http"}, ["MASTER_PORT='http'"]),
        ({"LOCAL_RANK": "one"}, ["LOCAL_RANK='one'"]),
    ],
)
def test_a_wrong_variable_is_named(change: dict[str, str | None], words: list[str]) -> None:
    environ = {name: value for name, value in (TORCHRUN | change).items() if value is not None}
    with pytest.raises(UserError) as raised:
        World.from_environment(environ)
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert raised.value.exit_code == 2


@pytest.mark.parametrize("change", [{}, {"TORCHELASTIC_USE_AGENT_STORE": "True"}, {"DDP_REPORT_DIR": "/reports"}])
def test_what_is_written_is_read_back(change: dict[str, str]) -> None:
    """torchrun's variables, as `World` writes them, are the ones that it reads."""
    assert World.from_environment(TORCHRUN | change).to_environment() == TORCHRUN | change


def test_a_single_process_needs_no_store() -> None:
    world = World.from_environment({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "nonsense"})
    assert world == World()
    assert World.from_environment(world.to_environment()) == world


@pytest.mark.full
def test_nothing_else_knows_the_launchers_variables() -> None:
    """Two modules read the variables; the others are those in which a launcher hands a variable to its workers."""
    handed_on = {
        ("launch/elastic.py", "DDP_REPORT_DIR"),
        ("launch/nursery.py", "RANK"),
        ("live/workers.py", "LOCAL_RANK"),
    }
    named = {
        (name, node.value)
        for name, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in LAUNCHERS_VARIABLES
    }
    assert {(name, variable) for name, variable in named if name not in READERS} <= handed_on


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


@pytest.mark.full
def test_few_modules_touch_the_environment() -> None:
    """All other modules get values as arguments, so that one process can do two things that need different values."""
    may = {
        "cli/words.py": "keeps libraries quiet, before they are imported",
        "base/ending.py": "asks whether the terminal can clear a line",
        "base/fingerprint.py": "notes what decides which kernels a library picks",
        "base/determinism.py": "asks cuBLAS for deterministic kernels; sets the number of threads for workers, too",
        "distributed/addresses.py": "tells gloo its network interface, or checks what the user told it",
        "live/launch.py": "tells torchrun's agent that all nodes have as many workers",
        "live/collectives.py": "tells torch to let NCCL spare the processes of a live recovery",
        "distributed/children.py": "hands its environment on to the commands that it starts",
        "distributed/reports.py": "reads and tells which program has called `ddp_core.train`",
        "distributed/world.py": "reads the launcher's variables",
        "launch/elastic.py": "tells torchrun's agent and its workers",
        "launch/spawn.py": "tells the workers of mp.spawn",
        "launch/nursery.py": "gives a worker the environment that the agent meant for it",
        "launch/rendezvous.py": "tells the resolver not to wait for long",
        "numerics/limits.py": "reads whether the limits of portable numerics are set",
        "reduction/agreement.py": "hears whether somebody chose the number of threads",
        "cli/training.py": "hands its environment on to the `ddp train` that it starts",
        "cli/early_numerics.py": "sets those limits before torch is loaded, or starts the process anew",
        "base/process.py": "starts the process anew with hashes that are alike in all processes",
        "run/repeat.py": "gives a process that trains steps again the environment of a rank of its own",
        "run/asking.py": "finds the process that repeats a run's steps",
        "run/repeater.py": "tells workers where the process waits that repeats their steps",
        "run/rehearsing.py": "hands its environment on to the process that rehearses a resume",
        "record/environment.py": "notes libraries' settings and what the image was built from",
    }
    touching = {
        name
        for name, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute | ast.alias) and _name(node) in ("environ", "environb", "getenv", "putenv")
    }
    assert touching - may.keys() == set()


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Every module of ddp_core: path below the package, and syntax tree."""
    root = Path(ddp_core.__file__).parent
    return ((str(file.relative_to(root)), ast.parse(file.read_text())) for file in root.rglob("*.py"))


def _name(node: ast.Attribute | ast.alias) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.name

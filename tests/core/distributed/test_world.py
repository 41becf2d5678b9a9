"""Who am I: the launcher's variables, read in one place and checked."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ddp_core
from ddp_core.distributed.world import World
from ddp_core.errors import UserError

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
LAUNCHERS_VARIABLES = {*TORCHRUN, "GROUP_WORLD_SIZE", "ROLE_RANK", "DDP_REPORT_DIR"}


def test_without_a_launcher_there_is_one_process() -> None:
    world = World.from_environment({})
    assert world == World()
    assert (world.rank, world.world_size, world.nnodes, world.is_first, world.launch_id) == (0, 1, 1, True, None)
    assert not World.is_set({"RANK": "0"})


def test_torchruns_variables_are_read() -> None:
    world = World.from_environment(TORCHRUN)
    assert (world.rank, world.world_size, world.local_rank, world.nproc_per_node) == (5, 8, 1, 4)
    assert (world.nnodes, world.node_rank, world.launch_id, world.restart_count) == (2, 1, "launch-7", 2)
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


def test_nothing_else_reads_the_launchers_variables() -> None:
    """Reading is `os.environ[...]` and `.get`; mp.spawn's side must set them, and the store's address is torch's."""
    readers = set()
    for file in Path(ddp_core.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            name = None
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and _is_environ(node.value):
                name = node.slice
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("get", "getenv")
            ):
                name = (
                    node.args[0] if node.args and (_is_environ(node.func.value) or node.func.attr == "getenv") else None
                )
            if isinstance(name, ast.Constant) and name.value in LAUNCHERS_VARIABLES:
                readers.add((file.name, name.value))
    assert {pair for pair in readers if pair[1] not in ("MASTER_ADDR", "MASTER_PORT")} <= {
        ("world.py", name) for name in LAUNCHERS_VARIABLES
    }


def _is_environ(node: ast.AST) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )

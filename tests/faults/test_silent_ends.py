"""A process that leaves with exit code 0 in mid-training: no launch takes that for success, and one line says who."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddp_core.base.user_code import no_silent_end
from tests.support.commands import ddp, trained

LEAVING = str(Path(__file__).parent / "experiment_files" / "leaving.py")
LAYOUTS = {
    "single": (),
    "dp": ("--layout", "dp", "--nproc-per-node", "2"),
    "restart": ("--layout", "ddp", "--nproc-per-node", "2", "--recovery", "restart"),
    "live": ("--layout", "ddp", "--nproc-per-node", "2", "--recovery", "live"),
}
ONE_PROCESS = ("single", "dp")


def words(output: Path, layout: str) -> list[str]:
    return ["train", LEAVING, "--device", "cpu", "--output", str(output), *LAYOUTS[layout]]


@pytest.mark.full
@pytest.mark.parametrize("how", ["os._exit", "c"])
@pytest.mark.parametrize("layout", ["single", "dp", "restart", "live"])
def test_a_process_that_leaves_in_mid_training_ends_the_launch_with_2(tmp_path: Path, layout: str, how: str) -> None:
    rank = 0 if layout in ONE_PROCESS else 1
    ended = ddp(*words(tmp_path, layout), env={"LEAVES": f"{rank} {how}"})
    said = [line for line in ended.errors.splitlines() if "your code ended the process at" in line]
    assert (ended.code, len(said)) == (2, 1), ended.errors
    assert f"rank {rank} (node 0): your code ended the process at {LEAVING}:" in said[0]
    _, record = trained(tmp_path)
    assert (record["status"], record["exit_code"]) == ("failed", 2), record["message"]
    if layout != "live":  # where rank 0 waits for others when it is ended
        assert said[0].endswith(record["message"])


@pytest.mark.parametrize("layout", [pytest.param("restart", marks=pytest.mark.slow), "live"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_c_code_ends_itself_is_no_success_either(tmp_path: Path, layout: str, rank: int) -> None:
    ended = ddp(*words(tmp_path, layout), env={"LEAVES": f"{rank} _exit"})
    _, record = trained(tmp_path)
    assert ended.code in (2, 6), ended.errors
    assert (record["status"], record["exit_code"]) == ("failed", ended.code)


def test_a_file_that_leaves_when_it_is_run_is_bad_input(tmp_path: Path) -> None:
    ended = ddp(*words(tmp_path, "restart"), env={"LEAVES": "0 import"})
    assert (ended.code, ended.errors.count("your code ended the process at")) == (2, 1), ended.errors


def test_what_is_forked_in_such_a_block_may_end_as_it_likes() -> None:
    with no_silent_end(pytest.fail):
        child = os.fork()
        if not child:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    before = os._exit
    assert before.__module__ == "posix"

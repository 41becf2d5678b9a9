"""A function of the user's that changes the state of one rank alone: seen before the next save, by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_core.base.errors import ExitCode
from ddp_core.checkpoint import find_checkpoints
from ddp_core.record.directory import find_runs
from tests.support.commands import ddp

FILE = Path(__file__).parent / "experiment_files" / "one_rank_alone.py"


@pytest.mark.full
@pytest.mark.parametrize(
    ("changed", "ranks", "name", "where"),
    [
        ("1.running_mean", 2, "buffer 1.running_mean", "0, 1 of 2"),
        ("1.running_var", 3, "buffer 1.running_var", "0 of 3"),
        ("momentum", 3, "parameter 0.weight", "0 of 3"),
    ],
)
def test_the_first_tensor_that_differs_is_named_and_nothing_is_saved(
    tmp_path: Path, changed: str, ranks: int, name: str, where: str
) -> None:
    words = ["train", FILE, "--layout", "ddp", "--device", "cpu", "--nproc-per-node", ranks, "--output", tmp_path]
    ended = ddp(*words, "--checkpoint-every", 2, "--max-restarts", 0, env={"CHANGED": changed})
    assert ended.code == ExitCode.BAD_INPUT, ended.errors
    # Momentum shows in the weights, which come first, after the next update.
    assert f"step 4 {name} is not the same" in ended.errors
    assert f"(differs: {where})" in ended.errors
    assert "the checkpoint of step 2 is good" in ended.errors
    ((directory, record),) = find_runs(tmp_path)
    assert [each.step for each in find_checkpoints(directory.checkpoints)] == [2]
    assert record["exit_code"] == ExitCode.BAD_INPUT


@pytest.mark.full
def test_optimizer_state_that_no_update_has_used_yet_is_compared(tmp_path: Path) -> None:
    words = ["train", FILE, "--layout", "ddp", "--device", "cpu", "--nproc-per-node", 3, "--output", tmp_path]
    ended = ddp(*words, "--checkpoint-every", 3, "--max-restarts", 0, env={"CHANGED": "momentum"})
    assert ended.code == ExitCode.BAD_INPUT
    assert "after step 3 the optimizer's momentum_buffer of 0.weight is not the same" in ended.errors


each_shard = pytest.mark.parametrize(
    # The fast ones: nothing is cut, and all is.
    "shard",
    ["none", "parameters", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("optimizer", "gradients"))],
)


@pytest.mark.full
@each_shard
def test_what_is_cut_among_ranks_is_not_compared(tmp_path: Path, shard: str) -> None:
    words = ["train", FILE, "--layout", "ddp", "--device", "cpu", "--nproc-per-node", 2, "--output", tmp_path]
    assert ddp(*words, "--shard", shard, "--checkpoint-every", 2).code == ExitCode.DONE


@pytest.mark.full
@each_shard
def test_a_callback_of_one_rank_that_changes_weights_is_found_by_the_rehearsal(tmp_path: Path, shard: str) -> None:
    """Where weights are cut, no comparison of ranks shows it: the owners' updates have spread the change.

    Where only the optimizer's state or gradients are cut, weights differ from one process's in the next step: this
    one is the last of the rehearsal, so the witness finds it.
    """
    words = ["train", FILE, "--layout", "ddp", "--device", "cpu", "--nproc-per-node", 2, "--output", tmp_path]
    changed = {"CHANGED": "0.weight", "STEP": "5"}
    ended = ddp(*words, "--shard", shard, "--set", "max_steps=7", "--rehearsal", "on", env=changed)
    assert (ended.code, "Traceback" in ended.errors) == (ExitCode.BAD_INPUT, False), ended.errors
    is_next = shard in ("optimizer", "gradients")
    assert ("the result depends on the layout" if is_next else "first in step 5 of a rehearsal") in ended.errors

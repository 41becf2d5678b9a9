"""A function of the user's that changes the state of one rank alone: seen before the next save, by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_core.base.errors import ExitCode
from ddp_core.checkpoint import find_checkpoints
from ddp_core.record.directory import find_runs
from tests.support.commands import Ended, ddp

FILE = Path(__file__).parent / "experiment_files" / "one_rank_alone.py"


def train(output: Path, ranks: int, *words: object, **env: str) -> Ended:
    where = ("--layout", "ddp", "--device", "cpu", "--nproc-per-node", ranks, "--max-restarts", 0)
    return ddp("train", FILE, *where, "--output", output, *words, env=env)


@pytest.mark.full
@pytest.mark.parametrize(
    ("changed", "ranks", "every", "name", "where"),
    [
        ("1.running_mean", 2, 2, "step 4 buffer 1.running_mean", "0, 1 of 2"),
        ("1.running_var", 3, 2, "step 4 buffer 1.running_var", "0 of 3"),
        # Momentum shows in the weights, which come first, after the next update.
        ("momentum", 3, 2, "step 4 parameter 0.weight", "0 of 3"),
        ("momentum", 3, 3, "step 3 the optimizer's momentum_buffer of 0.weight", "0 of 3"),
    ],
)
def test_the_first_tensor_that_differs_is_named_and_nothing_is_saved(
    tmp_path: Path, changed: str, ranks: int, every: int, name: str, where: str
) -> None:
    ended = train(tmp_path, ranks, "--checkpoint-every", every, CHANGED=changed)
    assert ended.code == ExitCode.BAD_INPUT, ended.errors
    assert f"{name} is not the same" in ended.errors
    assert f"(differs: {where})" in ended.errors
    ((directory, record),) = find_runs(tmp_path)
    assert [each.step for each in find_checkpoints(directory.checkpoints)] == [2] * (every == 2)
    assert ("the checkpoint of step 2 is good" in ended.errors) is (every == 2)
    assert record["exit_code"] == ExitCode.BAD_INPUT


@pytest.mark.full
@pytest.mark.parametrize("shard", ["none", "parameters", pytest.param("optimizer", marks=pytest.mark.slow)])
def test_what_is_cut_among_ranks_is_not_compared(tmp_path: Path, shard: str) -> None:
    """A change of weights by one rank's callback is found by the rehearsal.

    Where weights are cut, no comparison of ranks shows it: the owners' updates have spread the change. Where only the
    optimizer's state is cut, weights differ from one process's in the next step: this one is the last of the rehearsal,
    so the witness finds it.
    """
    words = ("--shard", shard, "--checkpoint-every", 2)
    assert train(tmp_path / "unchanged", 2, *words).code == ExitCode.DONE
    changed = {"CHANGED": "0.weight", "STEP": "5"}
    ended = train(tmp_path / "out", 2, "--shard", shard, "--set", "max_steps=7", "--rehearsal", "on", **changed)
    assert (ended.code, "Traceback" in ended.errors) == (ExitCode.BAD_INPUT, False), ended.errors
    said = "the result depends on the layout" if shard == "optimizer" else "first in step 5 of a rehearsal"
    assert said in ended.errors

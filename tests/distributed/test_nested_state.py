"""Optimizers that keep tensors in lists, dicts or queues: resumed as they were, also where these are cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_core.base.errors import ExitCode
from tests.support.commands import ddp, trained
from tests.support.layout_cases import FILES

NESTED = str(FILES / "nested_state.py")
DDP = ("--layout", "ddp", "--nproc-per-node", "2")


def digests(output: Path) -> tuple[str, str]:
    record = trained(output)[1]
    return record["weights_sha256"], record["optimizer_sha256"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "shard"),
    [
        ("deque", "gradients"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("deque", "none"),
                ("list", "none"),
                ("dict", "none"),
                ("dict", "optimizer"),
                ("list", "parameters"),
            )
        ),
    ],
)
def test_a_killed_run_goes_on_as_if_it_had_not_been(tmp_path: Path, kind: str, shard: str) -> None:
    words, env = ("train", NESTED, "--device", "cpu", "--checkpoint-every", "5", "--output"), {"KIND": kind}
    assert ddp(*words, tmp_path / "whole", env=env).code == 0
    assert ddp(*words, tmp_path / "cut", "--fault", "kill@6", "--synchronous-save", env=env).code != 0
    ended = ddp(*words, tmp_path / "cut", "--resume", "auto", *DDP, "--shard", shard, env=env)
    assert ended.code == 0, ended.errors
    assert len(trained(tmp_path / "cut")[1]["attempts"]) == 2
    assert digests(tmp_path / "cut") == digests(tmp_path / "whole")


@pytest.mark.full
@pytest.mark.parametrize("words", [(), (*DDP, "--shard", "optimizer")], ids=["single", "cut"])
def test_state_that_no_checkpoint_can_hold_is_refused(words: tuple[str, ...], tmp_path: Path) -> None:
    ended = ddp("train", NESTED, "--device", "cpu", *words, "--output", tmp_path, env={"KIND": "object"})
    assert (ended.code, "Traceback" in ended.errors) == (ExitCode.BAD_INPUT, False)
    assert "your optimizer, Nested, keeps a state that no checkpoint can hold: state['state.0.newest']" in ended.errors

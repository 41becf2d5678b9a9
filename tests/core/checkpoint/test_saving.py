"""Checkpoints that are copied and written while training goes on, without faults."""

from __future__ import annotations

import copy
import functools
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_core.checkpoint import Checkpointer, Superseded, describe, find_checkpoints, load, newest_valid, sweep
from ddp_core.checkpoint.saving import WRITER_NICENESS
from ddp_core.checkpoint.state import Snapshots, StateTensors
from tests.core.checkpoint.children import state_of
from tests.core.checkpoint.saved import same, steps_in, trained
from tests.support.processes import HANG
from tests.support.wording import refusing


@pytest.mark.full
def test_what_only_an_update_changes_is_copied_while_training_goes_on(tmp_path: Path) -> None:
    model, optimizer, _ = trained()
    lines: list[str] = []
    with Checkpointer(tmp_path, asynchronous=True, keep_last=9, on_event=lines.append) as checkpointer:
        expected = []
        for step in range(1, 9):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            expected.append(copy.deepcopy(state))
            checkpointer.save(state, step=step, epoch=0, changing=model.buffers())
            optimizer.zero_grad()
            model(torch.randn(2, 3, 8, 8)).square().sum().backward()
            checkpointer.before_update()
            optimizer.step()
            checkpointer.before_update()
    found = [load(checkpoint) for checkpoint in sorted(find_checkpoints(tmp_path), key=lambda each: each.step)]
    assert len(found) == 8
    assert all(same(left, right) for left, right in zip(found, expected, strict=True))
    assert all("stood still" in line for line in lines)


def test_whoever_returns_from_the_copy_finds_all_of_it() -> None:
    tensors = [torch.full((1000,), float(number)) for number in range(20)]
    snapshots, wrong = Snapshots(), []
    for _ in range(20):
        state = snapshots.copy(StateTensors(tensors), tensors[:1])
        assert torch.equal(state[0], tensors[0])
        assert not snapshots.arrived

        def copy_and_look(state: list[torch.Tensor] = state) -> None:
            snapshots.carry_on()
            wrong.extend(number for number in range(20) if not torch.equal(state[number], tensors[number]))

        threads = [threading.Thread(target=copy_and_look) for _ in range(3)]
        for thread in threads:
            thread.start()
        copy_and_look()
        for thread in threads:
            thread.join()
        assert snapshots.arrived
        for number, tensor in enumerate(tensors):
            tensor.add_(number + 1)
    assert wrong == []


def test_a_failed_copy_fails_every_thread_that_waits_for_it() -> None:
    """Else a writer would commit what another thread has not copied."""
    snapshots, own = Snapshots(), StateTensors([torch.ones(3)])
    snapshots.copy(own, now=[])
    snapshots._left.clear()
    snapshots._left.append((torch.zeros(2), torch.ones(3)))
    for said in ("must match", "a part of the state could not be copied"):
        with pytest.raises(RuntimeError, match=said):
            snapshots.carry_on()


class _Gate:
    """Holds a save at one point until the gate is opened."""

    def __init__(self, point: str) -> None:
        self.point, self.reached, self.open = point, threading.Event(), threading.Event()

    def __call__(self, point: str) -> None:
        if point == self.point:
            self.reached.set()
            assert self.open.wait(HANG)


def test_training_goes_on_while_the_state_of_the_call_is_written(tmp_path: Path) -> None:
    gate = _Gate("data opened")
    weight = torch.ones(1000)
    inner = [1, 2]
    checkpointer = Checkpointer(tmp_path, asynchronous=True, at=gate)
    checkpointer.save({"weight": weight, "inner": inner}, step=1, epoch=0)
    assert gate.reached.wait(HANG)
    weight.zero_()
    inner.append(3)
    checkpointer.check()
    assert find_checkpoints(tmp_path) == []
    gate.open.set()
    checkpointer.close()
    loaded = load(find_checkpoints(tmp_path)[0])
    assert loaded["inner"] == [1, 2]
    assert torch.equal(loaded["weight"], torch.ones(1000))


def test_the_next_save_waits_for_the_one_before_and_reuses_its_copies(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, asynchronous=True, keep_last=9)
    checkpointer.prepare(state_of(0))
    buffers = [buffer.data_ptr() for buffer in checkpointer._snapshots._copies]
    for step in range(1, 6):
        checkpointer.save(state_of(step), step=step, epoch=0)
        assert [buffer.data_ptr() for buffer in checkpointer._snapshots._copies] == buffers
    checkpointer.save(state_of(6, floats=7), step=6, epoch=0)
    checkpointer.close()
    for checkpoint in find_checkpoints(tmp_path):
        expected = state_of(checkpoint.step, floats=7 if checkpoint.step == 6 else 30_000)
        assert same(load(checkpoint), expected)


@pytest.mark.parametrize("how", ["check", "save", "wait", "close"])
def test_an_error_in_the_background_surfaces_once(tmp_path: Path, how: str) -> None:
    def fail(point: str) -> None:
        if point == "data written":
            raise RuntimeError("the writer broke")

    checkpointer = Checkpointer(tmp_path, asynchronous=True, at=fail)
    checkpointer.save(state_of(1), step=1, epoch=0)
    assert isinstance(checkpointer._pending.exception(20), RuntimeError)
    actions = {
        "check": checkpointer.check,
        "save": lambda: checkpointer.save(state_of(2), step=2, epoch=0),
        "wait": checkpointer.wait,
        "close": checkpointer.close,
    }
    with refusing(RuntimeError):
        actions[how]()
    checkpointer.check()
    assert list(tmp_path.iterdir()) == []


def test_the_error_of_the_training_is_not_hidden_by_that_of_the_writer(tmp_path: Path) -> None:
    def fail(point: str) -> None:
        raise RuntimeError("the writer broke")

    lines: list[str] = []

    def train() -> None:
        with Checkpointer(tmp_path, asynchronous=True, at=fail, on_event=lines.append) as checkpointer:
            checkpointer.save(state_of(1), step=1, epoch=0)
            raise KeyError("training")

    with pytest.raises(KeyError, match="training"):
        train()
    assert lines == ["warning: the last checkpoint failed too: the writer broke"]


def test_sweeping_spares_a_live_writer(tmp_path: Path) -> None:
    (tmp_path / "notes.tmp").write_text("mine")
    (tmp_path / ".step-000000009.pt.0123456789ab.tmp").write_text("of a dead writer")
    for point in ("data written", "data renamed"):
        gate = _Gate(point)
        checkpointer = Checkpointer(tmp_path, asynchronous=True, at=gate)
        checkpointer.save(state_of(1), step=1, epoch=0)
        assert gate.reached.wait(HANG)
        swept = sweep(tmp_path)
        gate.open.set()
        checkpointer.close()
        assert [path.name for path in swept] in ([".step-000000009.pt.0123456789ab.tmp"], [])
        assert newest_valid(tmp_path) is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "latest.json",
        "notes.tmp",
        "step-000000001-2.pt",
        "step-000000001.json",
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has no niceness of its own")
def test_a_save_is_written_by_a_thread_that_lets_training_go_first(tmp_path: Path) -> None:
    seen = set()

    def look(point: str) -> None:
        niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        seen.add((threading.current_thread().name.rpartition("_")[0], niceness))

    with Checkpointer(tmp_path, asynchronous=True, at=look) as checkpointer:
        checkpointer.save(state_of(1), step=1, epoch=0)
    # Also of a process that lets others go first itself; 19 is the end.
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert seen == {("checkpoint-writer", min(19, own + WRITER_NICENESS))}


def test_misuse_is_a_programmers_error(tmp_path: Path) -> None:
    for options in ({"keep_last": 0}, {"keep_every": 0}):
        with refusing(ValueError):
            Checkpointer(tmp_path, **options)
    with pytest.raises(TypeError):
        Checkpointer(tmp_path).save({}, step=1, epoch=0, metadata={"path": Path("x")})
    deep = functools.reduce(lambda inner, _: [inner], range(200), list[Any]())
    with refusing(ValueError):
        Checkpointer(tmp_path).save({}, step=1, epoch=0, metadata={"deep": deep})
    with pytest.raises(ValueError, match="not JSON compliant"):  # the rest of it is Python's, and changes with it
        Checkpointer(tmp_path).save({}, step=1, epoch=0, metadata={"loss": float("nan")})
    assert find_checkpoints(tmp_path) == []
    with pytest.raises(TypeError, match=r"state\['a'\] has a key .* of type object"):
        describe({"a": {object(): torch.ones(1)}})
    with pytest.raises(ValueError, match=r"a\.b"):
        describe({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)})


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_is_told_with_its_size_and_seconds(tmp_path: Path, asynchronous: bool) -> None:
    lines: list[str] = []
    with Checkpointer(tmp_path, asynchronous=asynchronous, on_event=lines.append) as checkpointer:
        assert checkpointer.last is None
        for step in (1, 2, 3):
            checkpointer.save(state_of(step), step=step, epoch=0, best=step == 1)
            checkpointer.before_update()
        checkpointer.close()
        checkpointer.save(state_of(4), step=4, epoch=0)  # a closed one begins anew
    stood = r", training stood still for (\d+\.\d{3}) s" if asynchronous else ""
    for step, line in enumerate(lines, start=1):
        found = re.fullmatch(rf"checkpoint of step {step}: \d+(\.\d+)? \w+ in (\d+\.\d{{3}}) s{stood}", line)
        assert found is not None, line
        assert all(float(seconds) < 60 for seconds in found.groups()[1:])
    assert steps_in(tmp_path) == [4, 3, 1], "two are kept, and the best one"


def test_a_save_that_is_given_up_is_told_with_its_step(tmp_path: Path) -> None:
    lines: list[str] = []
    answers = iter([True])
    with (
        pytest.raises(Superseded),
        Checkpointer(tmp_path, fence=lambda: next(answers, False), on_event=lines.append) as checkpointer,
    ):
        checkpointer.save(state_of(5), step=5, epoch=0)
    assert lines[0].startswith("warning: checkpoint of step 5 given up: this process may no longer write to")


def test_a_save_does_without_a_niceness_that_the_system_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    with Checkpointer(tmp_path, asynchronous=True) as checkpointer:
        checkpointer.save(state_of(1), step=1, epoch=0)
    assert len(find_checkpoints(tmp_path)) == 1

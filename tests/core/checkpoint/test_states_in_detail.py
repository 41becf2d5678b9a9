"""What a Checkpointer says and keeps, and what is made of a state before it is written."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_core.base.errors import UserError
from ddp_core.checkpoint import Checkpointer, Superseded, best_checkpoint, describe, find_checkpoints, load
from ddp_core.checkpoint.ranks import Ranks, telling_others
from ddp_core.checkpoint.state import Snapshots, StateTensors, replaced
from tests.core.checkpoint.children import state_of
from tests.support.wording import refusing

SAVED = r"checkpoint of step {}: \d+(\.\d+)? \w+ in (\d+\.\d{{3}}) s"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_is_told_and_may_be_the_best(tmp_path: Path, asynchronous: bool) -> None:
    lines: list[str] = []
    with Checkpointer(tmp_path, asynchronous=asynchronous, on_event=lines.append) as checkpointer:
        assert checkpointer.last is None
        for step, best in ((1, True), (2, False), (3, False)):
            checkpointer.save(state_of(step), step=step, epoch=0, best=best)
            checkpointer.before_update()
        checkpointer.close()
        assert len(find_checkpoints(tmp_path)) == 3  # two are kept, and the best one
        checkpointer.save(state_of(4), step=4, epoch=0)
    for step, line in enumerate(lines, start=1):
        found = re.fullmatch(
            SAVED.format(step) + (r", training stood still for (\d+\.\d{3}) s" if asynchronous else ""), line
        )
        assert found is not None, line
        assert all(float(seconds) < 60 for seconds in found.groups()[1:])
    best = best_checkpoint(tmp_path)
    assert best is not None
    assert best.step == 1
    assert len(find_checkpoints(tmp_path)) == 3


def test_a_save_that_is_given_up_is_told_with_its_step(tmp_path: Path) -> None:
    lines: list[str] = []
    answers = iter([True])
    with (
        pytest.raises(Superseded),
        Checkpointer(tmp_path, fence=lambda: next(answers, False), on_event=lines.append) as checkpointer,
    ):
        checkpointer.save(state_of(5), step=5, epoch=0)
    assert lines[0].startswith("warning: checkpoint of step 5 given up: this process may no longer write to")


def test_every_checkpoint_may_be_kept(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep_last=1, keep_every=1) as checkpointer:
        for step in range(1, 5):
            checkpointer.save(state_of(step), step=step, epoch=0)
    assert len(find_checkpoints(tmp_path)) == 4


def test_numbers_that_json_does_not_know_are_no_metadata(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer, refusing(ValueError):
        checkpointer.save(state_of(1), step=1, epoch=0, metadata={"loss": float("nan")})


def test_snapshots_without_a_copy_have_nothing_to_wait_for() -> None:
    snapshots = Snapshots()
    assert snapshots.arrived
    snapshots.ready()
    snapshots.let_change()
    snapshots.carry_on()


def test_snapshots_keep_their_memory_while_the_state_keeps_its_shape() -> None:
    snapshots = Snapshots()
    first = snapshots.copy(StateTensors({"a": torch.ones(3), "b": torch.zeros(2)}))
    second = snapshots.copy(StateTensors({"a": torch.full((3,), 2.0), "b": torch.zeros(2)}))
    assert second["a"].tolist() == [2, 2, 2]
    assert second["a"].data_ptr() == first["a"].data_ptr()
    third = snapshots.copy(StateTensors({"a": torch.ones(4)}))
    assert third["a"].tolist() == [1] * 4


def test_a_failed_copy_fails_every_thread_that_waits_for_it() -> None:
    snapshots, own = Snapshots(), StateTensors({"a": torch.ones(3)})
    snapshots.copy(own, now=[])
    assert not snapshots.arrived
    snapshots._left.clear()
    snapshots._left.append((torch.zeros(2), torch.ones(3)))
    with pytest.raises(RuntimeError, match="must match"):
        snapshots.carry_on()
    with refusing(RuntimeError):
        snapshots.carry_on()
    assert snapshots.copy(own, now=[])["a"].shape == (3,)
    snapshots.carry_on()


def test_names_of_a_state_are_dotted_from_its_top() -> None:
    one = torch.ones(1)
    shape = ["float32", [1]]
    assert describe([one, {"a": (one, 5)}]) == {"0": shape, "1.a.0": shape}
    assert describe({("a", 1): one, 2: [one]}) == {"('a', 1)": shape, "2.0": shape}
    with refusing(TypeError):
        describe({"a": {object(): one}})
    seen: list[str] = []
    replaced([1, {"a": (2, [3])}], lambda leaf, name: seen.append(name))
    assert seen == ["0", "1.a.0", "1.a.1.0"]


def test_parameters_come_back_as_plain_tensors_and_views_on_their_own(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    state = {"weight": torch.nn.Parameter(torch.ones(2)), "view": whole[2:4], "grown": torch.ones(2).requires_grad_()}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state, step=1, epoch=0)
        assert checkpointer.last is not None
        found = load(checkpointer.last)
    assert [(type(each), each.requires_grad) for each in found.values()] == [(torch.Tensor, False)] * 3
    assert found["view"].tolist() == [2, 3]
    own = StateTensors(state)
    assert [type(each) for each in own.tensors] == [torch.Tensor] * 3
    assert StateTensors({"a": whole}).tensors[0] is whole


class Group:
    """A process group of which nothing is asked but its rank and its size."""

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 3


def test_ranks_use_their_own_group_and_its_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    group: Any = Group()
    calls: list[Any] = []

    def gather(values: list[Any], own: Any, group: Any) -> None:
        calls.append(group)
        values[:] = ["a", own, "c"]

    def broadcast(box: list[Any], group: Any, group_src: int) -> None:
        calls.append((group, group_src))
        box[0] = ("first", box[0])

    fake = SimpleNamespace(
        all_gather_object=gather,
        broadcast_object_list=broadcast,
        is_initialized=lambda: True,
        destroy_process_group=lambda group: calls.append(("end", group)),
    )
    monkeypatch.setattr("ddp_core.checkpoint.ranks.dist", fake)
    ranks = Ranks(group, "rank 1")
    assert (ranks.rank, ranks.count, ranks.place, ranks.is_first) == (1, 3, "rank 1", False)
    assert ranks.gather("b") == ["a", "b", "c"]
    assert ranks.hear_first(7) == ("first", 7)
    with pytest.raises(UserError, match=r"^no room$"), telling_others(ranks):
        raise UserError("no room")
    ranks.end()
    ranks.end()
    assert calls == [group, (group, 0), group, ("end", group)]
    fake.is_initialized = lambda: False
    Ranks(group, "rank 1").end()
    assert len(calls) == 4

"""Checkpoints of which each rank writes a part: what is written, read, kept and removed, and what a failure leaves."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.checkpoint import (
    Checkpointer,
    CutTensor,
    Readers,
    describe,
    find_checkpoints,
    load,
    newest_valid,
    read_checkpoint,
    sweep,
    verify,
    whole_tensors,
)
from ddp_core.checkpoint.committing import POINTS, POINTS_OF_PARTS
from ddp_core.checkpoint.manifest import Damaged
from ddp_core.checkpoint.parts import part_of, put_together
from ddp_core.record.weights import read_weights
from tests.core.checkpoint import parts_cases as cases
from tests.core.checkpoint.saved import REFERENCE
from tests.support.wording import refusing


@pytest.mark.parametrize(("count", "asynchronous"), [(2, False), (3, True), (7, False)])
def test_what_all_ranks_have_written_is_read_as_one_process_would_have_saved_it(
    tmp_path: Path, count: int, asynchronous: bool
) -> None:
    [newest, older] = cases.save(tmp_path, count, 10, 20, asynchronous=asynchronous)
    assert (newest.step, older.step) == (20, 10)
    assert newest == newest_valid(tmp_path)
    for checkpoint in (newest, older):
        state = load(checkpoint)
        parts = [f"step-0000000{checkpoint.step}.part-{n + 1}-of-{count}.pt" for n in range(count)]
        assert cases.described(state) == cases.described(cases.whole_state(checkpoint.step))
        assert state["model"]["weight"] is state["model"]["again"]
        assert checkpoint.shapes == describe(state)
        assert [part.file for part in checkpoint.parts] == parts
        assert checkpoint.bytes == sum((tmp_path / name).stat().st_size for name in parts)
        for name in (checkpoint.manifest.name, parts[0], parts[-1]):
            assert read_checkpoint(tmp_path / name, sha256=checkpoint.sha256) == checkpoint
    assert read_weights(newest.path)["turned"].equal(cases.whole_state(20)["model"]["turned"])


def test_a_state_is_read_in_parts_and_put_together_where_it_is_wanted(tmp_path: Path) -> None:
    [checkpoint] = cases.save(tmp_path, 3, 10)
    state, whole = load(checkpoint, in_parts=True), cases.whole_state(10)
    turned = state["model"]["turned"]
    assert isinstance(turned, CutTensor)
    assert sorted(turned.pieces) == [0, 13, 26]
    assert turned.elements(11, 30).equal(whole["model"]["turned"].as_strided((40,), (1,))[11:30])
    assert turned.whole().stride() == whole["model"]["turned"].stride()
    assert state["model"]["weight"] is state["model"]["again"]
    put = whole_tensors(state)
    assert cases.described(put) == cases.described(whole)
    assert put["model"]["weight"] is put["model"]["again"]


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_whole_state_is_read_in_parts_as_it_is(tmp_path: Path, in_parts: bool) -> None:
    Checkpointer(tmp_path).save(cases.whole_state(10), step=10, epoch=0)
    [checkpoint] = find_checkpoints(tmp_path)
    state = load(checkpoint, in_parts=in_parts)
    for file in checkpoint.data:
        (tmp_path / file.file).unlink()
    assert cases.described(state) == cases.described(cases.whole_state(10))


def test_readers_verify_a_share_each_and_all_hear_what_one_has_found(tmp_path: Path) -> None:
    [checkpoint] = cases.save(tmp_path, 3, 10)
    cases.flip_a_bit(tmp_path / checkpoint.parts[2].file)
    meeting, found = threading.Barrier(2), [None, None]

    def read(number: int) -> tuple[bool, str]:
        has_found = []

        def agree(error: Exception | None) -> None:
            has_found.append(error is not None)
            found[number] = error  # type: ignore[call-overload]
            meeting.wait()
            if (first := next(filter(None, found), None)) is not None:
                raise first

        with pytest.raises(UserError) as caught:
            load(checkpoint, readers=Readers(number, 2, agree))
        assert caught.value.exit_code == ExitCode.NO_CHECKPOINT
        return has_found[0], str(caught.value)

    with ThreadPoolExecutor(2) as threads:
        (first_found, first), (second_found, second) = threads.map(read, range(2))
    assert (first_found, second_found) == (True, False), "files 0 and 2 are the first reader's"
    assert checkpoint.parts[2].file in first
    assert first == second


def test_each_rank_passes_its_points_in_the_order_of_the_page(tmp_path: Path) -> None:
    passed: list[list[str]] = [[], []]

    def work(ranks: cases.ThreadRanks) -> None:
        cases.save_in_parts(tmp_path, ranks, 10, keep_last=1)
        cases.save_in_parts(tmp_path, ranks, 20, keep_last=1, at=passed[ranks.rank].append)

    assert cases.in_threads(work, 2) == [None, None]
    data = POINTS[: POINTS.index("data renamed") + 1]
    assert passed == [[*data, "parts reported", *POINTS[len(data) :], "outcome told"], [*data, *POINTS_OF_PARTS]]
    text = REFERENCE.read_text().partition("## The order of the writes")[2]
    assert all(f"`{point}`" in text for point in POINTS_OF_PARTS)


@pytest.mark.parametrize(("part", "damage"), [(0, cases.truncate), (1, cases.flip_a_bit), (2, Path.unlink)])
def test_a_checkpoint_with_a_damaged_part_is_passed_over_and_the_part_is_named(
    tmp_path: Path, part: int, damage: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    newest, older = cases.save(tmp_path, 3, 10, 20)
    assert cases.is_whole(older)
    damage(tmp_path / newest.parts[part].file)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a part was loaded"))
    lines: list[str] = []
    assert newest_valid(tmp_path, lines.append) == older
    assert newest.parts[part].file in lines[0]
    for read in (verify, load):
        with pytest.raises(UserError, match=re.escape(newest.parts[part].file)) as caught:
            read(newest)
        assert caught.value.exit_code == ExitCode.NO_CHECKPOINT


def contents(count: int = 3) -> tuple[list[Any], Any]:
    parts = [part_of(cases.cut_state(10, rank, count), rank == 0) for rank in range(count)]
    return [content for content, _ in parts], parts[0][1]


WEIGHT = "model.weight"
# Each for the pieces that some of three parts have, instead of theirs: all of 24 elements, in three equal pieces.
SPOILED: dict[str, dict[int, dict[str, dict[int, torch.Tensor] | None]]] = {
    "one lost": {1: {WEIGHT: None}},
    "the last one lost": {2: {WEIGHT: None}},
    "all lost": {number: {WEIGHT: None} for number in range(3)},
    "all empty": {number: {WEIGHT: {}} for number in range(3)},
    "one twice": {1: {WEIGHT: {0: torch.ones(8)}}},
    "one too far": {1: {WEIGHT: {23: torch.ones(2)}}},
    "another type": {1: {WEIGHT: {8: torch.ones(8).double()}}},
    "an unknown name": {1: {"model.other": {0: torch.ones(2)}}},
}


@pytest.mark.parametrize("how", [*SPOILED, "gaps"])
def test_parts_that_are_not_the_whole_are_damaged(how: str) -> None:
    parts, shapes = contents()
    assert cases.described(whole_tensors(put_together(parts, shapes))) == cases.described(cases.whole_state(10))
    for number, pieces in SPOILED.get(how, {}).items():
        changed = parts[number]["pieces"] | pieces
        parts[number]["pieces"] = {name: each for name, each in changed.items() if each is not None}
    if how == "gaps":
        parts[0]["strides"][WEIGHT] = [12, 1]
    with pytest.raises(Damaged, match=r"model\.(weight|other)"):
        put_together(parts, shapes)


def test_two_tensors_of_one_name_and_a_cut_one_without_ranks_are_refused(tmp_path: Path) -> None:
    with refusing(TypeError):
        Checkpointer(tmp_path).save(cases.cut_state(10, 0, 1), step=10, epoch=0)
    cut = CutTensor(torch.float32, (1,), (1,), {0: torch.ones(1)})
    for other in (cut, torch.ones(1)):
        with refusing(ValueError):
            part_of({"a": {"b": cut}, "a.b": other}, is_first=True)


def test_old_checkpoints_go_with_all_their_parts(tmp_path: Path) -> None:
    cases.save(tmp_path, 3, 10, 20, keep_last=1)
    Checkpointer(tmp_path, keep_last=1).save(cases.whole_state(30), step=30, epoch=0, best=True)
    assert cases.names(tmp_path) == {"step-000000030.json", "step-000000030.pt"}
    [newest] = cases.save(tmp_path, 2, 30)
    assert cases.is_whole(newest)
    assert {part.file for part in newest.data} == {f"step-000000030.part-{n}-of-2.pt" for n in (1, 2)}
    [again] = cases.save(tmp_path, 2, 30)
    assert cases.names(tmp_path) == {"step-000000030.json", *(f"step-000000030-2.part-{n}-of-2.pt" for n in (1, 2))}
    assert cases.is_whole(again)


def test_an_unreadable_manifest_goes_with_the_parts_beside_it(tmp_path: Path) -> None:
    [damaged] = cases.save(tmp_path, 2, 10)
    cases.truncate(damaged.manifest)
    cases.save(tmp_path, 2, 20, 30)
    cases.save(tmp_path, 2, 40)
    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == [40, 30]
    assert not [name for name in cases.names(tmp_path) if "10" in name]


def test_what_dead_ranks_left_is_swept_and_what_a_live_one_holds_is_not(tmp_path: Path) -> None:
    swept: list[list[str]] = []

    def look(reached: str) -> None:
        if reached == "data renamed":
            swept.append([path.name for path in sweep(tmp_path)])

    leftovers = {"step-000000009.part-2-of-2.pt", ".step-000000009.part-1-of-2.pt.0123456789ab.tmp"}
    for name in leftovers:
        (tmp_path / name).touch()
    ended = cases.in_threads(lambda ranks: cases.save_in_parts(tmp_path, ranks, 10, at=look), 2)
    assert ended == [None, None]
    # A file that is swept between its making and its locking is made anew.
    assert {name for found in swept for name in found} >= leftovers
    assert cases.is_whole(newest_valid(tmp_path))

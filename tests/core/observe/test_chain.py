"""What a chain's file is read as, where it is damaged, and where two of them part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ddp_core.base.errors import UserError
from ddp_core.observe.chain import CHAIN, BrokenChain, ChainFile, ChainPlan, compare_chains, each_link

FACTS: dict[str, Any] = {
    **{name: name for name in ("experiment_sha256", "code_sha256", "data_sha256", "start_sha256")},
    **{"fingerprint": {"torch": "2"}, "from_step": 0, "total_steps": 9, "keep": 3, "every": 3, "micro_batches": 2},
}


def a_step(step: int, **changes: str) -> dict[str, Any]:
    numbers = [f"{step * 10 + each:016x}" for each in range(3)]
    told = {"ids": numbers[0], "contents": "".join(numbers[:2]), "losses": "".join(numbers[:2]), "lr": numbers[0]}
    return {"kind": "step", "step": step, "epoch": 0, **told, "state": "".join(numbers), **changes}


def written(folder: Path, steps: int = 6, changes: Mapping[int, Mapping[str, str]] | None = None) -> ChainFile:
    folder.mkdir(exist_ok=True)
    file = ChainFile(ChainPlan(folder / CHAIN, 3, 3, True))
    file.begin(FACTS, ["weight", "bias", "averaged weights, scaler or schedule"])
    for step in range(1, steps + 1):
        file.append(a_step(step, **(changes or {}).get(step, {})))
        if step % 3 == 0:
            file.append({"kind": "evaluation", "step": step, "figures": {"test_loss": 0.1 * step}})
            file.append({"kind": "kept", "step": step, "state_sha256": "ab", "weights_sha256": "cd"})
    return file


def test_the_last_head_stands_for_all_lines(tmp_path: Path) -> None:
    file = written(tmp_path)
    links = list(each_link(tmp_path / CHAIN))
    assert len({link.head for link in links}) == len(links) == 11
    assert links[-1].head == file.head
    assert written(tmp_path / "again").head == file.head
    assert written(tmp_path / "other", changes={1: {"lr": f"{1:016x}"}}).head != file.head


@pytest.mark.parametrize("place", [30, -30, 900])
def test_a_byte_that_was_changed_is_found(tmp_path: Path, place: int) -> None:
    written(tmp_path)
    content = bytearray((tmp_path / CHAIN).read_bytes())
    content[place] ^= 1
    (tmp_path / CHAIN).write_bytes(content)
    with pytest.raises(BrokenChain):
        list(each_link(tmp_path / CHAIN))


def test_a_line_that_was_left_out_is_found(tmp_path: Path) -> None:
    written(tmp_path)
    lines = (tmp_path / CHAIN).read_bytes().splitlines(keepends=True)
    (tmp_path / CHAIN).write_bytes(b"".join(lines[:3] + lines[4:]))
    with pytest.raises(BrokenChain, match="line 4 was changed, or a line before it"):
        list(each_link(tmp_path / CHAIN))


def test_a_resumed_run_goes_on_as_if_never_ended(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole", 6).head
    written(tmp_path, 5)
    with (tmp_path / CHAIN).open("ab") as half:
        half.write(b'{"half":')
    again = ChainFile(ChainPlan(tmp_path / CHAIN, 3, 3, False))
    again.go_on(3)
    assert again.step == 3
    for step in (4, 5, 6):
        again.append(a_step(step))
    again.append({"kind": "evaluation", "step": 6, "figures": {"test_loss": 0.1 * 6}})
    again.append({"kind": "kept", "step": 6, "state_sha256": "ab", "weights_sha256": "cd"})
    assert again.head == whole
    assert (tmp_path / CHAIN).read_bytes() == (tmp_path / "whole" / CHAIN).read_bytes()
    with pytest.raises(UserError, match="ends with step 6, before the checkpoint of step 9"):
        ChainFile(ChainPlan(tmp_path / CHAIN, 3, 3, False)).go_on(9)


def test_lines_that_the_file_lacks_are_added_and_none_is_written_twice(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole", 6)
    written(tmp_path, 4)
    again = ChainFile(ChainPlan(tmp_path / CHAIN, 3, 3, False))
    again.go_on(6, lambda reached: [a_step(step) for step in range(reached + 1, 7)])
    again.append({"kind": "evaluation", "step": 6, "figures": {"test_loss": 0.1 * 6}})
    # Another process takes the chain up here, and does again what follows the step.
    third = ChainFile(ChainPlan(tmp_path / CHAIN, 3, 3, False))
    third.go_on(6)
    third.append({"kind": "evaluation", "step": 6, "figures": {"test_loss": 0.1 * 6}})
    third.append({"kind": "kept", "step": 6, "state_sha256": "ab", "weights_sha256": "cd"})
    assert third.head == whole.head
    assert (tmp_path / CHAIN).read_bytes() == (tmp_path / "whole" / CHAIN).read_bytes()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"ids": f"{1:016x}"}, "the ids of its samples"),
        ({"contents": f"{40:016x}{1:016x}"}, "the samples of micro-batch 1"),
        ({"losses": f"{1:016x}{41:016x}"}, "the loss of micro-batch 0"),
        ({"lr": f"{1:016x}"}, "the learning rate"),
        ({"state": f"{40:016x}{1:016x}{2:016x}"}, "after the update, bias, or the optimizer state of it (and 1 more)"),
    ],
)
def test_two_chains_part_where_a_step_differs(tmp_path: Path, change: dict[str, str], what: str) -> None:
    written(tmp_path / "one")
    written(tmp_path / "other", changes={4: change, 5: {"ids": ""}})
    causes, parting, alike = compare_chains(tmp_path / "one" / CHAIN, tmp_path / "other" / CHAIN)
    assert (causes, parting, alike) == ([], (4, what), 3)


def test_a_run_that_ended_earlier_parts_there(tmp_path: Path) -> None:
    written(tmp_path / "one", 6)
    written(tmp_path / "other", 4)
    _, parting, alike = compare_chains(tmp_path / "one" / CHAIN, tmp_path / "other" / CHAIN)
    assert (parting, alike) == ((5, "only one of them goes on"), 4)
    assert compare_chains(tmp_path / "one" / CHAIN, tmp_path / "one" / CHAIN) == ([], None, 6)

"""Models that change while they are trained: the same bits on every layout, or refused with name and step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.resuming import digests, kill_at
from tests.support.commands import ddp, train

FILES = Path(__file__).with_name("experiment_files")
DP = ("--layout", "dp", "--nproc-per-node", "3")
DDP = ("--layout", "ddp", "--nproc-per-node", "2")
HELD_OUT = ("--set", "data.held_out=5", "--set", "evaluation.samples_per_batch=4")
LAYOUTS = {"single": (), "dp": DP, "ddp": DDP}


def changing(kind: str) -> tuple[str, ...]:
    return (str(FILES / "changing.py"), "--set", f"model.kind={kind}")


def writing(kind: str) -> tuple[str, ...]:
    return (str(FILES / "writing.py"), "--set", f"model.kind={kind}")


def slow(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def full(*values: object) -> Any:
    return pytest.param(*values, marks=pytest.mark.full)


def ends(output: Path, *words: str, ranks: int = 0) -> tuple[Any, ...]:
    record = train(output, *words, ranks=ranks)
    return (*digests(record), record["ema_sha256"])


@pytest.mark.full
@pytest.mark.parametrize("kind", ["usual", *map(slow, ("hooks", "pseudo labels", "cache"))])
def test_it_ends_with_the_same_bits_on_three_layouts(tmp_path: Path, kind: str) -> None:
    words = changing(kind)
    found = [ends(tmp_path / "1", *words), ends(tmp_path / "dp", *words, *DP), ends(tmp_path / "2", *words, ranks=2)]
    assert found == [found[0]] * 3


@pytest.mark.full
def test_a_resumed_run_trains_what_the_killed_one_did(tmp_path: Path) -> None:
    expected = digests(train(tmp_path / "whole", *changing("usual")))
    words = [*changing("usual"), "--checkpoint-every", "3"]
    kill_at(tmp_path / "cut", 5, *words)
    record = train(tmp_path / "cut", *words, "--resume", "auto", ranks=2)
    assert len(record["attempts"]) == 2
    assert digests(record) == expected


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("clamp", ()),
        slow("out of reach", ()),
        # In the last step there are no micro-batches for a third rank.
        slow("clamp", ("--set", "global_batch_size=20", "--set", "last_batch=keep")),
        # Of three ranks one has no batch of the evaluation.
        slow("clamp in evaluation", (*HELD_OUT, "--set", "ema_decay=0.9")),
    ],
)
def test_a_forward_that_writes_the_same_everywhere_is_accepted(
    tmp_path: Path, kind: str, more: tuple[str, ...]
) -> None:
    words = (*writing(kind), *more)
    found = [
        ends(tmp_path / "single", *words),
        ends(tmp_path / "dp", *words, *DP),
        ends(tmp_path / "ddp", *words, ranks=3),
        ends(tmp_path / "shards", *words, "--shard", "gradients", ranks=3),
        ends(tmp_path / "evaluated by rank 0", *words, "--set", "evaluation.where=rank0", ranks=2),
    ]
    assert found == [found[0]] * 5


BUFFER = "forward changes the buffer seen"
UNFREEZES = "first.weight and 1 more are trained now"
ROWS = "parameter words.weight"
AGAIN = "forward changes the parameter last.weight in one micro-batch otherwise than in the one before it"
FREED = "forward changes the parameter words.weight, which shard mode parameters frees after each pass"
PARAMETERS = ("--shard", "parameters")


@pytest.mark.parametrize(
    ("words", "layout", "said"),
    [
        full(changing("counter"), "single", ["step 1, rank", BUFFER]),
        full(changing("counter"), "dp", ["step 1, rank", BUFFER]),
        full(changing("rare"), "ddp", ["step 4, rank", BUFFER]),
        (changing("unfreezes"), "single", ["step 1, rank", UNFREEZES]),
        slow(changing("unfreezes"), "dp", ["step 1, rank", UNFREEZES]),
        (changing("unfreezes"), "ddp", ["step 1, rank", UNFREEZES]),
        full(changing("rank 0 alone"), "ddp", [f"step 3, rank 0 (node 0): {UNFREEZES}, and not the same on all ranks"]),
        *(
            each(
                (*changing("usual"), "--shard", shard),
                "ddp",
                ["step 3, rank ", f"{UNFREEZES}, and --shard {shard} has cut what was trained at first"],
            )
            for each, shard in ((slow, "optimizer"), (full, "parameters"))
        ),
        # With one micro-batch for each replica or rank, only a comparison of these finds it; the others do it earlier.
        (writing("rows unseen"), "single", ["step 1", ROWS]),
        (writing("rows unseen"), "dp", ["step 1", ROWS]),
        (writing("rows unseen"), "ddp", ["step 1", ROWS]),
        (writing("max_norm"), "ddp", ["step 1", ROWS, "max_norm"]),
        (writing("max_norm of bags"), "single", ["step 1", ROWS, "max_norm"]),
        (writing("decay"), "single", ["step 1, rank", AGAIN]),
        (writing("decay"), "ddp", ["step 1, rank", AGAIN]),
        (writing("decay unseen"), "single", ["step 1, rank", AGAIN]),
        slow(writing("decay unseen"), "ddp", ["step 1, rank", AGAIN]),
        full((*writing("rows in evaluation"), *HELD_OUT), "single", ["after step 4", ROWS]),
        full((*writing("rows in evaluation"), *HELD_OUT), "ddp", ["after step 4", ROWS]),
        full((*writing("max_norm"), *PARAMETERS), "ddp", ["step 1, rank", FREED]),
        # The loss is tried in evaluation mode; one that is known is not.
        full((*writing("clamp in evaluation"), *PARAMETERS), "ddp", ["step 1, rank", FREED]),
        full(
            (*writing("clamp in evaluation"), "--set", "loss=cross_entropy", "--set", "data.held_out=5", *PARAMETERS),
            "ddp",
            ["evaluation after step 4", FREED],
        ),
    ],
)
def test_what_cannot_be_the_same_everywhere_is_refused(
    tmp_path: Path, words: tuple[str, ...], layout: str, said: list[str]
) -> None:
    where = (*LAYOUTS[layout], "--device", "cpu", "--output", tmp_path, "--max-restarts", "0")
    ended = ddp("train", *words, *where)
    assert (ended.code, "Traceback" in ended.errors) == (2, False), ended.errors
    assert all(each in ended.errors for each in said), ended.errors

"""Models that change while they are trained: the same bits on every layout, or refused with name and step."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from ddp_core.config.layout import SHARD_MODES
from ddp_core.record.reading import Run
from tests.distributed.resuming import digests
from tests.support.commands import ddp, train, trained
from tests.support.layout_cases import FILES

CHANGING, WRITING = (str(FILES / f"{name}.py") for name in ("changing", "writing"))
DP = ("--layout", "dp", "--nproc-per-node", "3")
DDP = ("--layout", "ddp", "--nproc-per-node", "2")
DDP_3 = ("--layout", "ddp", "--nproc-per-node", "3")


def kind(name: str) -> tuple[str, ...]:
    return (CHANGING, "--set", f"model.kind={name}")


def writing(name: str) -> tuple[str, ...]:
    return (WRITING, "--set", f"model.kind={name}")


def refusal(output: Path, *words: str) -> str:
    ended = ddp("train", *words, "--device", "cpu", "--output", output, "--max-restarts", "0")
    assert (ended.code, "Traceback" in ended.errors) == (2, False), ended.errors
    return ended.errors


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        "usual",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("hooks", "pseudo labels", "cache", "renormalised")),
    ],
)
def test_it_ends_with_the_same_bits_on_three_layouts(tmp_path: Path, name: str) -> None:
    found = [
        digests(train(tmp_path / "single", *kind(name))),
        digests(train(tmp_path / "dp", *kind(name), *DP)),
        digests(train(tmp_path / "ddp", *kind(name), ranks=2)),
    ]
    assert found == [found[0]] * 3


@pytest.mark.full
def test_what_is_trained_changes_with_the_callback(tmp_path: Path) -> None:
    ends = []
    for steps in (1, 2, 4, 8):
        train(tmp_path / str(steps), *kind("usual"), "--set", f"max_steps={steps}")
        ends.append(Run(trained(tmp_path / str(steps))[0].path).load_model().state_dict())
    changed = [
        [not torch.equal(before[f"{layer}.weight"], after[f"{layer}.weight"]) for layer in ("first", "second", "last")]
        for before, after in itertools.pairwise(ends)
    ]
    assert changed == [[False, True, True], [True, True, True], [True, False, True]]


@pytest.mark.full
def test_a_resumed_run_trains_what_the_killed_one_did(tmp_path: Path) -> None:
    expected = digests(train(tmp_path / "whole", *kind("usual")))
    words = [*kind("usual"), "--checkpoint-every", "3"]
    cut = ("--fault", "kill@5", "--synchronous-save", "--device", "cpu", "--output", tmp_path / "cut")
    assert ddp("train", *words, *cut).code != 0
    record = train(tmp_path / "cut", *words, "--resume", "auto", ranks=2)
    assert len(record["attempts"]) == 2
    assert digests(record) == expected


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param("counter", (), id="counter-single"),
        pytest.param("counter", DP, id="counter-dp"),
        pytest.param("rare", DDP, id="rare-ddp"),
    ],
)
def test_a_buffer_that_forward_changes_is_refused_in_its_step(
    tmp_path: Path, name: str, layout: tuple[str, ...]
) -> None:
    step = 1 if name == "counter" else 4
    assert "forward changes the buffer seen" in (said := refusal(tmp_path, *kind(name), *layout)), said
    assert f"step {step}, rank" in said


@pytest.mark.parametrize("layout", [(), pytest.param(DP, marks=pytest.mark.slow), DDP], ids=["single", "dp", "ddp"])
def test_a_forward_that_unfreezes_is_refused(tmp_path: Path, layout: tuple[str, ...]) -> None:
    said = refusal(tmp_path, *kind("unfreezes"), *layout)
    assert "step 1, rank" in said
    assert "first.weight and 1 more are trained now" in said


@pytest.mark.full
def test_a_change_that_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    said = refusal(tmp_path, *kind("rank 0 alone"), *DDP)
    assert "step 3, rank 0 (node 0): first.weight and 1 more are trained now, and not the same on all ranks" in said
    assert "step 3" in (said := refusal(tmp_path, *kind("left out"))), said
    assert "first.weight is trained now, but no group of the optimizer has it" in said


@pytest.mark.full
@pytest.mark.parametrize(
    "shard", [mode if mode == "parameters" else pytest.param(mode, marks=pytest.mark.slow) for mode in SHARD_MODES]
)
def test_shards_refuse_a_change(tmp_path: Path, shard: str) -> None:
    said = refusal(tmp_path, *kind("usual"), *DDP, "--shard", shard)
    assert "step 3, rank " in said
    assert f"first.weight and 1 more are trained now, and --shard {shard} has cut what was trained at first" in said


@pytest.mark.full
@pytest.mark.parametrize("name", ["clamp", pytest.param("out of reach", marks=pytest.mark.slow)])
def test_a_forward_that_writes_the_same_everywhere_is_accepted(tmp_path: Path, name: str) -> None:
    found = [
        digests(train(tmp_path / "single", *writing(name))),
        digests(train(tmp_path / "dp", *writing(name), *DP)),
        digests(train(tmp_path / "ddp", *writing(name), ranks=2)),
        digests(train(tmp_path / "shards", *writing(name), *DDP, "--shard", "gradients", ranks=2)),
    ]
    assert found == [found[0]] * 4


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param("rows unseen", (), id="rows unseen-single"),
        pytest.param("rows unseen", DP, id="rows unseen-dp"),
        pytest.param("rows unseen", DDP, id="rows unseen-ddp"),
        pytest.param("max_norm", DDP, id="max_norm-ddp"),
        pytest.param("max_norm of bags", (), id="max_norm of bags-single"),
    ],
)
def test_a_forward_that_writes_to_the_rows_of_its_samples_is_refused(
    tmp_path: Path, name: str, layout: tuple[str, ...]
) -> None:
    """With one micro-batch for each replica or rank, only a comparison of these finds it; the others do it earlier."""
    said = refusal(tmp_path, *writing(name), *layout)
    assert "parameter words.weight" in said
    assert "step 1" in said
    assert "max_norm" in said or name == "rows unseen"


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("decay", ()),
        ("decay", DDP),
        ("decay unseen", ()),
        pytest.param("decay unseen", DDP, marks=pytest.mark.slow),
    ],
    ids=["decay-single", "decay-ddp", "decay unseen-single", "decay unseen-ddp"],
)
def test_a_forward_that_changes_weights_again_in_each_micro_batch_is_refused(
    tmp_path: Path, name: str, layout: tuple[str, ...]
) -> None:
    said = refusal(tmp_path, *writing(name), *layout)
    assert "step 1, rank" in said
    assert "forward changes the parameter last.weight in one micro-batch otherwise than in the one before it" in said


@pytest.mark.full
def test_a_write_in_evaluation_is_the_same_on_ranks_without_a_batch(tmp_path: Path) -> None:
    name = "clamp in evaluation"
    held_out = ("--set", "data.held_out=5", "--set", "evaluation.samples_per_batch=4", "--set", "ema_decay=0.9")
    found = [
        (*digests(record), record["ema_sha256"])
        for record in (
            train(tmp_path / "single", *writing(name), *held_out),
            train(tmp_path / "dp", *writing(name), *held_out, *DP),
            train(tmp_path / "ddp", *writing(name), *held_out, ranks=3),
            train(tmp_path / "rank 0", *writing(name), *held_out, "--set", "evaluation.where=rank0", ranks=2),
        )
    ]
    assert found == [found[0]] * 4


@pytest.mark.full
@pytest.mark.parametrize("layout", [(), DDP], ids=["single", "ddp"])
def test_a_write_in_evaluation_to_the_rows_of_its_samples_is_refused(tmp_path: Path, layout: tuple[str, ...]) -> None:
    held_out = ("--set", "data.held_out=5", "--set", "evaluation.samples_per_batch=4")
    said = refusal(tmp_path, *writing("rows in evaluation"), *held_out, *layout)
    assert "parameter words.weight" in said
    assert "after step 4" in said


@pytest.mark.slow
def test_a_write_is_the_same_where_the_last_step_has_no_micro_batch_for_a_rank(tmp_path: Path) -> None:
    rest = ("--set", "global_batch_size=20", "--set", "last_batch=keep")
    found = [
        digests(train(tmp_path / "single", *writing("clamp"), *rest)),
        digests(train(tmp_path / "dp", *writing("clamp"), *rest, *DP)),
        digests(train(tmp_path / "ddp", *writing("clamp"), *rest, ranks=3)),
        digests(train(tmp_path / "shards", *writing("clamp"), *rest, *DDP_3, "--shard", "optimizer", ranks=3)),
    ]
    assert found == [found[0]] * 4


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "settings", "when"),
    [
        ("max_norm", (), "step 1, rank"),
        ("clamp in evaluation", (), "step 1, rank"),
        ("clamp in evaluation", ("--set", "loss=cross_entropy", "--set", "data.held_out=5"), "evaluation after step 4"),
    ],
    ids=["max_norm", "trial of the loss", "evaluation"],
)
def test_sharded_parameters_refuse_a_forward_that_writes(
    tmp_path: Path, name: str, settings: tuple[str, ...], when: str
) -> None:
    said = refusal(tmp_path, *writing(name), *settings, *DDP, "--shard", "parameters")
    assert when in said
    assert "forward changes the parameter words.weight, which shard mode parameters frees after each pass" in said

"""Wrong words on the command line: one line says which, and what may have been meant."""

from __future__ import annotations

import pytest

from ddp_core.base.errors import near_names, nearest_name
from ddp_core.config.experiment import common_settings
from tests.core.cli.asking import said
from tests.support.wording import said_as_before


@pytest.mark.parametrize(
    "words",
    [
        "train digits --nnodes 4:2",
        "train digits --nnodes 0",
        "train digits --nnodes 2:",
        "train digits --nproc-per-node two",
        "train digits --checkpoint-every 0",
        "train digits --keep-last",
        "train digits --timeout inf",
        "train digits --layout dpp",
        "train digits --learning-rate 0.1",
        "train digits --epochs 3",
        "train digits --batch-size 3",
        "train digits --gpus 3",
        "train digits --nproc_per_node 2",
        "train digits --chekpoint-every 2",
        "train digits --nproc 2",
        "train digits more",
        "train",
        "tarin digits",
        "--versoin",
        "caims",
        "compare --jsno",
        "verify run --device gpu",
        "health --within soon",
        "data fetch",
        "data fecth",
        "data",
    ],
)
def test_a_wrong_word_is_an_error_in_one_line(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    said_as_before(said(capsys, *words.split()))


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("lr", ["optimizer.lr"]),
        ("learning_rate", ["optimizer.lr"]),
        ("warmup", ["schedule.warmup_steps"]),
        ("optimizer.momentun", ["optimizer.momentum"]),
        ("momentun", ["optimizer.momentum"]),
        ("batch_size", ["global_batch_size"]),
        ("name", []),
        ("xyzzy", []),
    ],
)
def test_a_setting_is_found_by_a_part_of_its_name(wrong: str, near: list[str]) -> None:
    found = near_names(wrong, common_settings())
    assert found == near or (not near and len(found) <= 1)


def test_a_setting_that_many_parts_have_names_them() -> None:
    assert nearest_name("name", ["model.name", "data.name"]) == "did you mean data.name or model.name?"
    assert nearest_name("xyzzy", ["b", "a"]) == "known: a, b"

"""Wrong words on the command line: one line says which, and what may have been meant."""

from __future__ import annotations

import pytest

from ddp_core.base.errors import near_names, nearest_name
from ddp_core.config.experiment import common_settings
from tests.core.cli.asking import said


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["train", "digits", "--nnodes", "4:2"], ["--nnodes", "4:2", "smaller"]),
        (["train", "digits", "--nnodes", "0"], ["--nnodes", "0", "greater than 0"]),
        (["train", "digits", "--nnodes", "2:"], ["--nnodes", "2:", "integer"]),
        (["train", "digits", "--nproc-per-node", "-1"], ["--nproc-per-node", "-1", "greater than 0"]),
        (["train", "digits", "--nproc-per-node", "two"], ["--nproc-per-node", "two", "integer"]),
        (["train", "digits", "--checkpoint-every", "0"], ["--checkpoint-every", "0", "greater than 0"]),
        (["train", "digits", "--keep-last"], ["--keep-last", "argument"]),
        (["train", "digits", "--timeout", "inf"], ["--timeout", "inf", "finite"]),
        (["train", "digits", "--layout", "dpp"], ["--layout", "dpp", "'single', 'dp', 'ddp'"]),
        (["train", "digits", "--learning-rate", "0.1"], ["--learning-rate", "did you mean --set optimizer.lr=VALUE?"]),
        (["train", "digits", "--lr", "0.1"], ["--lr", "did you mean --set optimizer.lr=VALUE?"]),
        (["train", "digits", "--epochs", "3"], ["--epochs", "did you mean --set epochs=VALUE?"]),
        (["train", "digits", "--batch-size", "3"], ["did you mean --set global_batch_size=VALUE?"]),
        (["train", "digits", "--gpus", "3"], ["--gpus", "ddp train --help"]),
        (["train", "digits", "--nproc_per_node", "2"], ["--nproc_per_node", "did you mean --nproc-per-node?"]),
        (["train", "digits", "--chekpoint-every", "2"], ["--chekpoint-every", "did you mean --checkpoint-every?"]),
        (["train", "digits", "--nproc", "2"], ["--nproc", "did you mean --nproc-per-node?"]),
        (["train", "digits", "more"], ["more", "ddp train --help"]),
        (["train"], ["EXPERIMENT", "ddp train --help"]),
        (["tarin", "digits"], ["tarin", "did you mean train?"]),
        (["--versoin"], ["--versoin", "did you mean --version?"]),
        (["caims"], ["caims", "did you mean claims?"]),
        (["compare", "--jsno"], ["--jsno", "did you mean --json?"]),
        (["verify", "run", "--device", "gpu"], ["--device", "gpu", "cuda"]),
        (["health", "--within", "soon"], ["--within", "soon", "float"]),
        (["data", "fetch"], ["NAME", "ddp data fetch --help"]),
        (["data", "fecth"], ["fecth", "did you mean fetch?"]),
        (["data"], ["command", "ddp data --help"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_wrong_word_is_an_error_in_one_line(
    words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = said(capsys, *words)
    assert all(part in line for part in parts), line


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

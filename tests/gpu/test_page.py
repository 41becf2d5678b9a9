"""The commands of the page on GPUs, made small."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.support.commands import ROOT, command

SMALL = [
    word
    for setting in ("data.image_size=64", "data.samples=256", "data.pool=64", "global_batch_size=64", "max_steps=4")
    for word in ("--set", setting)
]


def lines() -> list[list[str]]:
    """The words of each `ddp train` on the page, without `ddp`."""
    page = (ROOT / "docs" / "how-to" / "train-on-gpus.md").read_text()
    return [shlex.split(line) for line in re.findall(r"^ddp (train .*)$", page, re.MULTILINE)]


@pytest.mark.gpu
@pytest.mark.parametrize("words", lines(), ids=" ".join)
def test_the_pages_commands_train(words: list[str], tmp_path: Path) -> None:
    ended = command(*words, *SMALL, "--device", "cuda", "--output", tmp_path)
    assert ended.code == 0, ended.output + ended.errors

"""What tests of the command line share: what words are understood as, and the line with which they are refused."""

from __future__ import annotations

import pytest

from ddp_core.cli import main
from ddp_core.cli.click_kinds import asked_in
from ddp_core.cli.commands import ddp as group
from ddp_core.config.options import Asked


def understood(*words: str) -> Asked:
    """What `ddp train WORDS` asks for."""
    with group.commands["train"].make_context("train", list(words)) as context:
        return asked_in(context)


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 2) -> str:
    """The one line with which `ddp WORDS` is refused, with this exit code."""
    assert main(words) == code
    line = capsys.readouterr().err
    assert line.startswith("ddp: error: ")
    assert line.count("\n") == 1
    return line

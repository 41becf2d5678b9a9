"""A torch without one of the private names that this project uses: one line says so, before anything else ends."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_core.base import torch_names
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.torch_names import PRIVATE_NAMES, TRIED, require_private_names
from tests.support.commands import ROOT, command
from tests.support.wording import refusing


def take_away(name: str, patch: pytest.MonkeyPatch) -> None:
    """Let torch lack the name: in its files, and as an attribute of its owner."""
    word, real = name.rpartition(".")[2], torch_names._text
    patch.setattr(torch_names, "_text", lambda file: re.sub(rf"\b{word}\b", "other", real(file)))
    owner: Any = torch
    for part in PRIVATE_NAMES[name].owner.split(".")[1:]:
        owner = vars(owner).get(part) if owner is not None else None
    if owner is None or word not in dir(owner):
        return
    if owner is torch.Tensor:  # a type of C, of which nothing can be taken away
        words = {each.rpartition(".")[2] for each, private in PRIVATE_NAMES.items() if private.owner == "torch.Tensor"}
        patch.setattr(torch, "Tensor", type("Tensor", (), dict.fromkeys(words - {word})))
    else:
        patch.delattr(owner, word)


@pytest.mark.parametrize("name", PRIVATE_NAMES)
def test_a_name_that_is_gone_is_told_in_one_line(name: str) -> None:
    require_private_names()
    with pytest.MonkeyPatch.context() as patch:
        take_away(name, patch)
        with pytest.raises(UserError) as raised:
            require_private_names()
    assert raised.value.exit_code == ExitCode.BAD_INPUT
    line = str(raised.value)
    assert f"torch {torch.__version__} has no {name} ({PRIVATE_NAMES[name].owner})" in line
    assert f"on which ddp was tried, {TRIED}: `pip install" in line
    assert "\n" not in line


@pytest.mark.full
def test_a_command_ends_with_that_line_alone() -> None:
    program = "import sys, torch; del torch._foreach_mul_; from ddp_core.cli import main; sys.exit(main(sys.argv[1:]))"
    ended = command("train", "toy_mlp", "--device", "cpu", program=("-c", program))
    assert (ended.code, ended.output) == (ExitCode.BAD_INPUT, "")
    assert re.fullmatch(r"ddp: error: torch \S+ has no _foreach_mul_ \(torch\), a private name [^\n]+\n", ended.errors)


def test_the_releases_that_were_tried_are_those_that_are_admitted() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (bounds,) = [each for each in project["dependencies"] if each.startswith("torch>")]
    found = re.fullmatch(r"torch>=(2\.\d+),<2\.(\d+)", bounds)
    assert found is not None
    assert f"{found[1]} to 2.{int(found[2]) - 1}" == TRIED


def test_what_is_found_in_a_file_is_a_whole_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_names, "_text", lambda file: "self._shutdown_all(); self._my_shutdown()")
    with refusing():
        require_private_names()

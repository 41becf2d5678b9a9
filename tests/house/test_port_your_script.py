"""The tutorial that ports a script: page and files agree, few lines change, and every layout ends with one digest."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from tests.house.pages import Started
from tests.support.processes import run_processes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorials" / "port-your-script.md").read_text()
SCRIPTS = ROOT / "docs" / "tutorials" / "port-your-script"
BEFORE, AFTER = ((SCRIPTS / name).read_text().splitlines(keepends=True) for name in ("before.py", "after.py"))


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_shows_the_script_and_what_changes() -> None:
    assert blocks("python") == ["".join(BEFORE), (SCRIPTS / "evaluate.py").read_text()]
    assert blocks("diff") == ["".join(difflib.unified_diff(BEFORE, AFTER, "before.py", "after.py", n=1))]


def test_fourteen_lines_are_new() -> None:
    assert len([line for line in difflib.ndiff(BEFORE, AFTER) if line.startswith("+ ") and line.strip() != "+"]) == 14


def _run(rank: int, world_size: int, folder: Path, words: list[str]) -> str:
    os.chdir(folder)
    sys.argv = ["after.py", *words]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("error")  # none of it is deprecated, and the number of threads was chosen
        runpy.run_path(str(SCRIPTS / "after.py"), run_name="__main__")
    return printed.getvalue()


def _validate(rank: int, world_size: int) -> tuple[int, float]:
    evaluate = runpy.run_path(str(SCRIPTS / "evaluate.py"))["evaluate"]
    dist.init_process_group("gloo")
    try:
        return evaluate(*model_and_samples())
    finally:
        dist.destroy_process_group()


def model_and_samples() -> tuple[nn.Module, TensorDataset]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    return model, TensorDataset(torch.rand(1003, 64), torch.arange(1003) % 10)  # batches of 99, and one of 13


def test_validation_on_all_ranks_counts_each_sample_once_and_has_the_same_bits() -> None:
    (alone,) = run_processes(_validate, 1)
    for ranks in (2, 3):
        assert run_processes(_validate, ranks) == [alone] * ranks
    model, samples = model_and_samples()
    images, targets = samples.tensors
    with torch.no_grad():
        outputs = model.eval()(images)
    assert alone[0] == (outputs.argmax(1) == targets).sum()
    assert alone[1] == pytest.approx(cross_entropy(outputs, targets).item())


@pytest.mark.slow
def test_the_ported_script_ends_with_one_digest_also_when_resumed_on_other_ranks(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir(), stopped.mkdir()
    (expected,) = run_processes(_run, 1, whole, [])
    assert expected.startswith("48 steps, ")
    assert run_processes(_run, 3, stopped, ["25"]) == ["", "", ""]
    assert run_processes(_run, 2, stopped, []) == [expected, ""]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_line_from_top_to_bottom_under_torchrun(tmp_path: Path) -> None:
    """Run the page's commands in one folder; only the script that is not ported ends differently each time."""
    for name in ("before.py", "after.py"):
        (tmp_path / name).write_text((SCRIPTS / name).read_text())
    printed: dict[str, list[str]] = {"before.py": [], "after.py": []}
    for number, line in enumerate("".join(blocks("console")).splitlines()):
        text = line.replace("torchrun", f"{sys.executable} -m torch.distributed.run")
        started = Started(text, tmp_path, tmp_path / f"said-{number}", os.environ | {"PYTHONPATH": str(ROOT)})
        try:
            assert started.end() == 0, f"{line}\n{started.said}"
        finally:
            started.kill()
        for name, lines in printed.items():
            lines += [said for said in started.said.splitlines() if name in line and " steps, " in said]
    assert [line.split()[0] for line in printed["before.py"]] == ["96", "48", "33", "58"]
    assert len(set(printed["before.py"])) == 4
    assert len(printed["after.py"]) == 4
    assert len(set(printed["after.py"])) == 1

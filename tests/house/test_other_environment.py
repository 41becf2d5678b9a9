"""Which torch an environment beside `.venv` gets, and which packages of `.venv` go with it."""

from __future__ import annotations

import pytest

from tests.support.commands import ROOT
from tools.other_environment import split_pins, torch_packages

PROJECT = 'dependencies = [\n  "torch>=2.11,<2.14",\n  "torchvision>=0.26,<0.29",\n  "numpy>=2",\n]\n'


@pytest.mark.parametrize(
    ("release", "words"),
    [
        (None, []),
        ("oldest", ["torch==2.11", "torchvision==0.26"]),
        ("newest", ["torch", "torchvision"]),
        ("2.14.1", ["torch==2.14.1", "torchvision"]),
    ],
)
def test_the_torch_that_is_asked_for_need_not_be_admitted(release: str | None, words: list[str]) -> None:
    assert torch_packages(release, PROJECT) == words


def test_the_projects_own_bounds_are_found() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert [word.partition("==")[0] for word in torch_packages("oldest", project)] == ["torch", "torchvision"]


def test_what_torch_brings_is_not_kept() -> None:
    ours = ["numpy==2.4.6", "nvidia-ml-py==13.6", "torchdata==0.11.0", "torchmetrics==1.8"]
    torchs = ["torch==2.13.0+cpu", "torchvision==0.28.0", "triton==3.5", "nvidia-cublas==13.0", "setuptools==80.9"]
    assert split_pins([*torchs, *ours]) == (ours, torchs)

"""The how-to pages hold whose commands need nothing but this machine: run as they stand, they print what is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.house.test_tutorials import follow
from tests.support.commands import ROOT

PAGES = [
    "change-a-run-on-the-way",
    "my-digests-differ",
    "rehearse-a-long-run",
    "report-your-own-figures",
    "seeds-and-sweeps",
    "shard-the-optimizer",
    "stop-early",
    "train-from-python",
    "use-what-was-trained",
    "watch-a-run",
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PAGES)
def test_a_reader_sees_what_the_page_shows(name: str, installed: Path, tmp_path: Path) -> None:
    follow((ROOT / "docs" / "how-to" / f"{name}.md").read_text(), installed, tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("use-hydra", marks=pytest.mark.extras("hydra")),
        pytest.param("seeds-and-sweeps", marks=pytest.mark.extras("optuna")),
        pytest.param("use-what-was-trained", marks=pytest.mark.extras("onnx", "onnxscript")),
    ],
)
@pytest.mark.timeout(900)
def test_other_peoples_tools_do_what_the_page_shows(name: str, installed: Path, tmp_path: Path) -> None:
    follow((ROOT / "docs" / "how-to" / f"{name}.md").read_text(), installed, tmp_path)

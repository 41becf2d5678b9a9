"""Tutorials and how-to pages hold: each command is run as it stands, and what it prints is what the page shows."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from ddp_core.record.directory import find_runs
from tests.house.conftest import settings
from tests.house.pages import Reader

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [
    "tutorials/train-your-own-model",
    "tutorials/from-one-gpu-to-many-nodes",
    "tutorials/my-training-hangs",
    "tutorials/my-loss-changes-with-the-number-of-gpus",
    "how-to/change-a-run-on-the-way",
    "how-to/figures-and-losses-of-your-own",
    "how-to/hand-over-a-result",
    "how-to/my-digests-differ",
    "how-to/shard-the-optimizer",
    "how-to/train-from-python",
    "how-to/try-before-it-counts",
    "how-to/use-what-was-trained",
    "how-to/watch-a-run",
]
"""The pages whose commands need nothing but this machine."""
INSTALLING = ("mkdir first-", "python3 -m venv", "source .venv", "pip install", "make ")
"""Commands that make the environment, for which the fixture `installed` stands, or that need a clone."""
NEEDS = {"optuna": "python search.py", "hydra": "python tune.py", "onnxscript": "python to_onnx.py"}
"""Commands of pages that need a package that may be missing here."""


def follow(page: str, installed: Path, folder: Path) -> None:
    """Follow the page in `folder`. Raises AssertionError where something else happens than it shows."""
    shell = settings() | {"PATH": f"{installed}{os.pathsep}{os.environ['PATH']}"}
    del shell["OMP_NUM_THREADS"]  # set for the other tests; a reader's shell does not have it
    without = [] if shutil.which("py-spy", path=shell["PATH"]) else ["py-spy"]
    missing_here = [command for module, command in NEEDS.items() if find_spec(module) is None]
    (folder / "here").mkdir()
    Reader(folder / "here", shell, omit=[*INSTALLING, *without, *missing_here]).follow(page)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PAGES)
def test_a_reader_sees_what_the_page_shows(name: str, installed: Path, tmp_path: Path) -> None:
    follow((DOCS / f"{name}.md").read_text(), installed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("change-a-run-on-the-way", marks=pytest.mark.extras("hydra", "optuna")),
        pytest.param("use-what-was-trained", marks=pytest.mark.extras("onnx", "onnxscript")),
    ],
)
@pytest.mark.timeout(900)
def test_other_peoples_tools_do_what_the_page_shows(name: str, installed: Path, tmp_path: Path) -> None:
    follow((DOCS / "how-to" / f"{name}.md").read_text(), installed, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_first_day_ends_with_one_digest_for_each_job_and_the_same_answers_in_numpy(
    installed: Path, tmp_path: Path
) -> None:
    follow((DOCS / "tutorials" / "first-day.md").read_text(), installed, tmp_path)
    digests: dict[str, list[str]] = {}
    for _, record in find_runs(tmp_path / "here" / "outputs"):
        digests.setdefault(record["experiment"]["name"], []).append(record["weights_sha256"])
    assert {name: (len(found), len(set(found))) for name, found in digests.items()} == {
        "pictures": (2, 1),
        "gpt": (2, 1),
        "gru": (3, 1),
    }
    torch_says, _, numpy_says = sorted((tmp_path / "here-said").iterdir(), key=lambda log: int(log.name))[-3:]
    assert torch_says.read_text() == numpy_says.read_text()

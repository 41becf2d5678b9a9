"""What `pip install` of the wheel brings: the command, the experiments, and no top-level name that others may use."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from ddp_core.record.directory import find_runs
from tests.house.conftest import run
from tests.support.commands import ROOT
from tests.support.layout_cases import ADAMW_MLP
from tests.support.processes import HANG

# Two commands in one process, so that torch is imported once.
TRAIN = """
import sys
import ddp_core
from ddp_core.cli import main
assert ddp_core.__file__.startswith(sys.prefix)
for name in ("digits", "mine.py"):
    code = main(["train", name, "--device", "cpu", "--set", "max_steps=4"])
    if code:
        sys.exit(code)
"""


# A user's file. The last line is a mistake, which mypy sees only if the package says that it is typed.
TYPED = """
from ddp_core.base.errors import ExitCode
code: str = ExitCode.DONE
"""


def test_the_wheel_takes_no_name_that_could_be_anybodys(wheel: Path) -> None:
    top = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"ddp_core", "ddp_lab", "ddp_experiments"}


def test_the_wheel_carries_the_book_as_it_is(wheel: Path) -> None:
    book = zipfile.ZipFile(wheel).read("ddp_core/data/texts/alice.txt")
    assert book == (ROOT / "ddp_core" / "data" / "texts" / "alice.txt").read_bytes()


def test_the_wheel_carries_the_published_digests(wheel: Path) -> None:
    table = zipfile.ZipFile(wheel).read("ddp_lab/probe/portable-digests.json")
    assert table == (ROOT / "docs" / "reference" / "portable-digests.json").read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("mypy") is None, reason="there is no mypy in this environment, as in the image")
def test_a_users_mypy_sees_the_types_of_the_installed_package(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False)
    (packages,) = environment.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    (tmp_path / "mine.py").write_text(TYPED)
    words = [sys.executable, "-m", "mypy", "--strict", "--python-executable", environment / "bin" / "python", "mine.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=HANG, check=False)
    assert [line.rpartition("error: ")[2] for line in done.stdout.splitlines()[:-1]] == [
        'Incompatible types in assignment (expression has type "ExitCode", variable has type "str")  [assignment]'
    ]


@pytest.mark.slow
def test_an_installed_wheel_lists_and_trains_from_an_empty_directory(installed: Path, tmp_path: Path) -> None:
    listed = {line.split()[0] for line in run(tmp_path, installed / "ddp", "list").stdout.splitlines()}
    assert listed == {file.stem for file in (ROOT / "experiments").glob("*.py")}

    shutil.copy(ADAMW_MLP, tmp_path / "mine.py")
    done = run(tmp_path, installed / "python", "-c", TRAIN)
    assert done.stderr == ""
    records = [record for _, record in find_runs(tmp_path / "outputs")]
    assert sorted(record["experiment"]["name"] for record in records) == ["adamw_mlp", "digits"]
    assert {record["status"] for record in records} == {"completed"}

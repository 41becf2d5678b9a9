"""What `pip install` of the wheel brings: the command, the experiments, and no top-level name that others may use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from ddp_core.run.directory import find_runs
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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the working tree."""
    folder = tmp_path_factory.mktemp("wheel")
    run(ROOT, sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder)
    (built,) = folder.glob("*.whl")
    return built


# A user's file. The last line is a mistake, which mypy sees only if the package says that it is typed.
TYPED = """
from ddp_core.errors import ExitCode
code: str = ExitCode.DONE
"""


def run(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a program in `folder`, without the variables that point to this working tree.

    Raises AssertionError if the program fails.
    """
    settings = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "DDP_OUTPUT")}
    done = subprocess.run(
        [*map(str, words)], cwd=folder, env=settings, capture_output=True, text=True, timeout=HANG, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_the_wheel_takes_no_name_that_could_be_anybodys(wheel: Path) -> None:
    top = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"ddp_core", "ddp_lab", "ddp_experiments"}


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


@pytest.mark.skipif(find_spec("pip") is None, reason="there is no pip in this environment, as in the image")
def test_an_installed_wheel_lists_and_trains_from_an_empty_directory(wheel: Path, tmp_path: Path) -> None:
    environment, here = tmp_path / "environment", tmp_path / "empty"
    here.mkdir()
    venv.create(environment, with_pip=False)
    scripts = environment / "bin"
    pip = [sys.executable, "-m", "pip", "--python", scripts / "python", "--disable-pip-version-check"]
    run(here, *pip, "install", "-qq", "--no-index", "--no-deps", wheel)
    (packages,) = environment.glob("lib/python*/site-packages")
    # Let the new environment find this environment's dependencies. It does not follow the .pth files there, one of
    # which names the working tree.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    listed = {line.split()[0] for line in run(here, scripts / "ddp", "list").stdout.splitlines()}
    assert listed == {file.stem for file in (ROOT / "experiments").glob("*.py")}

    shutil.copy(ADAMW_MLP, here / "mine.py")
    done = run(here, scripts / "python", "-c", TRAIN)
    assert done.stderr == ""
    records = [record for _, record in find_runs(here / "outputs")]
    assert sorted(record["experiment"]["name"] for record in records) == ["adamw_mlp", "digits"]
    assert {record["status"] for record in records} == {"completed"}

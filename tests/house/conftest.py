"""The wheel of the working tree, and an environment into which it is installed as a user installs it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.commands import LAUNCHER_VARIABLES, ROOT
from tests.support.processes import HANG


def run(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a program in `folder`, without the variables that point to this working tree.

    Raises AssertionError if the program fails.
    """
    done = subprocess.run(
        [*map(str, words)], cwd=folder, env=settings(), capture_output=True, text=True, timeout=HANG, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def settings() -> dict[str, str]:
    """The environment's variables without those that point to this working tree, or to a launch."""
    left_out = {"PYTHONPATH", "DDP_OUTPUT", "DDP_DATA", *LAUNCHER_VARIABLES}
    return {name: value for name, value in os.environ.items() if name not in left_out}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the working tree."""
    folder = tmp_path_factory.mktemp("wheel")
    run(ROOT, sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of a new environment, into which the wheel is installed."""
    if find_spec("pip") is None:
        pytest.skip("there is no pip in this environment, as in the image")
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, with_pip=False)
    scripts = environment / "bin"
    pip = [sys.executable, "-m", "pip", "--python", scripts / "python", "--disable-pip-version-check"]
    run(environment, *pip, "install", "-qq", "--no-index", "--no-deps", wheel)
    (packages,) = environment.glob("lib/python*/site-packages")
    # Let the new environment find this environment's dependencies. It does not follow the .pth files there, one of
    # which names the working tree.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return scripts

"""The wheels of the working tree, and an environment into which they are installed as a user installs them."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.commands import LAUNCHER_VARIABLES, ROOT, ran


def run(folder: Path, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program in `folder`, without the variables that point to this working tree.

    Raises AssertionError if the program fails.
    """
    done = ran(*words, cwd=folder, env=settings() | variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def settings() -> dict[str, str]:
    """The variables of a reader: without those that point to this working tree, to a launch, or are set for tests."""
    left_out = {"PYTHONPATH", "DDP_OUTPUT", "DDP_DATA", "DDP_REHEARSAL", *LAUNCHER_VARIABLES}
    return {name: value for name, value in os.environ.items() if name not in left_out}


def build(folder: Path, **variables: str) -> dict[str, Path]:
    """Build both wheels and the sdist of the working tree into `folder`; returns them by name."""
    words = [sys.executable, "-m", "hatchling", "build", "--directory", folder]
    run(ROOT, *words, **variables)
    run(ROOT / "packages" / "lab", *words, "--target", "wheel", **variables)
    (library,), (lab,), (source,) = map(folder.glob, ("samebits-*.whl", "samebits_lab-*.whl", "*.tar.gz"))
    return {"library": library, "lab": lab, "source": source}


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels `library` and `lab`, and the sdist `source`, of the working tree."""
    return build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="session")
def installed(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of a new environment, into which both wheels are installed."""
    if find_spec("pip") is None:
        pytest.skip("there is no pip in this environment, as in the image")
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, with_pip=False)
    scripts = environment / "bin"
    pip = [sys.executable, "-m", "pip", "--python", scripts / "python", "--disable-pip-version-check"]
    run(environment, *pip, "install", "-qq", "--no-index", "--no-deps", built["library"], built["lab"])
    (packages,) = environment.glob("lib/python*/site-packages")
    # Let the new environment find this environment's dependencies. It does not follow the .pth files there, one of
    # which names the working tree.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return scripts

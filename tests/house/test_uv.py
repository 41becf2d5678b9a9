"""uv.lock holds what constraints.txt pins but for torch, with hashes; uv installs it, and `ddp` trains."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT
from tests.support.processes import HANG

LOCK = tomllib.loads((ROOT / "uv.lock").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OWN = {"samebits", "samebits-lab"}
TORCH = ("torch", "torchvision", "triton", "nvidia-cublas", "cuda-toolkit")


def plain(name: str) -> str:
    """The name of a package in its normal form (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def others() -> list[dict[str, Any]]:
    """The locked packages but for this project's own."""
    return [package for package in LOCK["package"] if package["name"] not in OWN]


def pins(file: str) -> dict[str, str]:
    """The versions that a file of constraints names, by package."""
    lines = [line.partition("==") for line in (ROOT / file).read_text().splitlines() if not line.startswith("#")]
    found = {plain(name): version for name, _, version in lines}
    assert len(found) == len(lines), "pip takes one version alone"
    return found


def test_the_pins_are_those_of_the_lock_and_of_torch_with_hashes() -> None:
    locked = {package["name"]: package["version"] for package in others()}
    assert pins("constraints.txt") == pins("constraints-torch.txt") | locked, "run `make uv-lock`"
    for package in others():
        files = [*package.get("wheels", ()), *([package["sdist"]] if "sdist" in package else [])]
        assert files
        assert all(file["hash"].startswith("sha256:") for file in files)


def test_the_lock_has_every_dependency_but_torch() -> None:
    lists = PROJECT["project"]
    asked = [*lists["dependencies"], *(each for extra in lists["optional-dependencies"].values() for each in extra)]
    names = {plain(re.split(r"[^\w.-]", requirement, maxsplit=1)[0]) for requirement in asked}
    locked = {package["name"] for package in others()}
    assert names - locked - OWN == set(PROJECT["tool"]["uv"]["exclude-dependencies"])
    assert not locked & set(TORCH)
    (project,) = [package for package in LOCK["package"] if package["name"] == lists["name"]]
    told = {each["name"] for each in project["metadata"]["requires-dist"]}
    assert names == told, "`make uv-lock` was not run after a change of pyproject.toml"


@pytest.mark.extras("uv")
def test_uv_accepts_the_lock_without_a_network() -> None:
    words = ["export", "--frozen", "--offline", "--quiet", "--all-extras", "--no-emit-workspace"]
    done = subprocess.run([_uv(), *words], cwd=ROOT, capture_output=True, text=True, timeout=HANG, check=True)
    lines = done.stdout.splitlines()
    required = {line.partition("==")[0] for line in lines if "==" in line}
    assert required == {package["name"] for package in others()}
    assert len([line for line in lines if "--hash=sha256:" in line]) >= len(required)


@pytest.mark.slow
@pytest.mark.extras("uv")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("installer", ["uv", "by hand"])
def test_uv_makes_an_environment_in_which_ddp_trains(installer: str, tmp_path: Path) -> None:
    if not _reaches("pypi.org"):
        pytest.skip("the package index cannot be reached")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.splitlines():
        if name.startswith(("ddp_core/", "ddp_lab/", "experiments/", "packages/", "tools/")) or "/" not in name:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    settings = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    settings["PATH"] = f"{Path(_uv()).parent}{os.pathsep}{settings['PATH']}"

    def run(*words: str, code: int = 0) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=settings, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    train = ["uv", "run", "--offline", "ddp", "train", "digits", "--device", "cpu", "--set", "max_steps=4"]
    if installer == "uv":
        made = run("make", "setup", "INSTALLER=uv", f"PYTHON={sys.executable}", "TORCH=cpu")
        assert "setup: done, with torch" in made
        run(".venv/bin/python", "-c", "import torchvision")
        assert run("make", "setup", "INSTALLER=uv", f"PYTHON={sys.executable}", "TORCH=cpu") == ""
    else:
        run("uv", "sync", "--quiet", "--inexact", "--extra", "digits", "--locked", "--python", sys.executable)
        assert "torch is not installed" in run(*train, code=2)
        links = os.environ.get("PIP_FIND_LINKS")
        place = ["--find-links", links] if links else ["--torch-backend", "cpu"]
        run("uv", "pip", "install", "--no-config", "--constraints", "constraints.txt", *place, "torch", "torchvision")
    assert "weights sha256" in run(*train)
    assert "weights sha256" in run(*train, "--layout", "ddp", "--nproc-per-node", "2")


def _uv() -> str:
    return str(Path(sys.executable).with_name("uv"))


def _reaches(host: str) -> bool:
    try:
        with socket.create_connection((host, 443), timeout=5):
            return True
    except OSError:
        return False

"""uv.lock holds what constraints.txt pins, with hashes, and never torch; uv installs it, and `ddp` trains."""

from __future__ import annotations

import re
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


def test_the_lock_has_the_pinned_versions_with_hashes() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {plain(name): version for name, equals, version in (line.partition("==") for line in lines) if equals}
    locked = {package["name"]: package["version"] for package in others()}
    assert locked.keys() <= pins.keys()
    assert {name: version for name, version in locked.items() if name in pins}.items() <= pins.items()
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


def _uv() -> str:
    return str(Path(sys.executable).with_name("uv"))

"""Which torch `make setup` takes: pip itself asks a stand-in of the CPU wheels' index, a folder."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.commands import ROOT, command
from tests.support.processes import HANG
from tools import torch_build

pytestmark = pytest.mark.skipif(find_spec("pip") is None, reason="there is no pip in this environment, as in the image")

PINS = {"torch": "2.13.0", "torchvision": "0.28.0"}
DRIVER = "/proc/driver/nvidia"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of the CPU wheels' index, which has torch alone; pip knows no other."""
    page = tmp_path / "cpu" / "torch" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text('<a href="torch-2.13.0%2Bcpu-py3-none-any.whl">torch</a>')
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("TORCH", raising=False)
    monkeypatch.setattr(torch_build, "PATIENCE", HANG)
    monkeypatch.setattr(torch_build, "CPU_INDEX", (tmp_path / "cpu").as_uri())
    return torch_build.CPU_INDEX


@pytest.fixture
def unasked(index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where the index is asked."""
    monkeypatch.setattr(torch_build, "offers", lambda *_: pytest.fail("the index is asked"))


def choose(build: torch_build.Build | None = None, driver: str | None = None) -> torch_build.Choice:
    return torch_build.choose_build(sys.executable, PINS, build, driver)


@pytest.mark.usefixtures("unasked")
def test_torch_for_cuda_is_chosen_without_the_index() -> None:
    assert choose(driver=DRIVER).words == []
    assert choose("cuda").words == ["torch!=2.13.0+cpu", "torchvision!=0.28.0+cpu"]


@pytest.mark.full
def test_the_build_is_that_of_the_driver_or_the_one_that_was_asked_for(index: str) -> None:
    cpu = ["--extra-index-url", index]
    assert choose().words == cpu
    assert choose("cpu", driver=DRIVER).words == [*cpu, "torch==2.13.0+cpu"]
    newer = PINS | {"torch": "2.14.0"}
    assert torch_build.choose_build(sys.executable, newer, None, None).words == [], "the index has another version"


@pytest.mark.usefixtures("index")
def test_an_index_that_takes_too_long_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_build, "PATIENCE", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the connection is made, and never answered
        monkeypatch.setattr(torch_build, "CPU_INDEX", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert choose().words == []


@pytest.mark.usefixtures("unasked")
@pytest.mark.parametrize(("variable", "value"), [("PIP_FIND_LINKS", "/wheels"), ("PIP_NO_INDEX", "1")])
def test_a_pip_that_is_told_where_to_look_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert choose().words == []
    assert choose("cpu").words == ["torch==2.13.0+cpu"]


@pytest.mark.parametrize(("variable", "way_out"), [("TORCH", "use TORCH=cpu or TORCH=cuda"), ("INSTALLER", "=uv")])
def test_a_setup_of_what_there_is_not_ends_with_2_before_anything_is_made(
    variable: str, way_out: str, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    ended = command(program=(str(tmp_path / "tools" / "environment.py"),), env={variable: "conda"})
    assert [path.name for path in tmp_path.iterdir()] == ["tools"]
    assert (ended.code, ended.output, ended.errors.count("\n")) == (2, "", 1)
    assert ended.errors.startswith(f"setup: {variable}=conda: ")
    assert way_out in ended.errors

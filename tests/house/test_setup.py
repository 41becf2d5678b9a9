"""Which torch `make setup` takes: pip itself asks a stand-in of the CPU wheels' index, on this machine's loopback."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.commands import ROOT, command
from tests.support.processes import HANG
from tools import torch_build

pytestmark = pytest.mark.skipif(find_spec("pip") is None, reason="there is no pip in this environment, as in the image")

PINS = {"torch": "2.13.0", "torchvision": "0.28.0"}


@dataclass
class Index:
    """Package indexes in the form of PEP 503, which are folders: one below `wheels` for each."""

    wheels: Path
    url: str = ""
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """The CPU wheels' index under /cpu, which has torch alone; pip knows no other."""
    served = Index(tmp_path / "indexes")
    make_wheel(served.wheels / "cpu", "torch", "2.13.0+cpu")

    class Answers(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            served.asked.append(self.path)
            super().do_GET()

        def log_message(self, format: str, *words: object) -> None: ...

    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("TORCH", raising=False)
    monkeypatch.setattr(torch_build, "PATIENCE", HANG)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Answers, directory=str(served.wheels))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        served.url = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setattr(torch_build, "CPU_INDEX", f"{served.url}/cpu")
        yield served
        server.shutdown()
        thread.join(HANG)


def make_wheel(index: Path, name: str, version: str) -> None:
    """Write a wheel that holds nothing but its description."""
    (index / name).mkdir(parents=True)
    described = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(index / name / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{described}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{described}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{described}/RECORD", "")


def choose(build: torch_build.Build | None = None, driver: str | None = None) -> torch_build.Choice:
    return torch_build.choose_build(sys.executable, PINS, build, driver)


@pytest.mark.full
def test_the_build_is_that_of_the_driver_or_the_one_that_was_asked_for(index: Index) -> None:
    driver, cpu = "/proc/driver/nvidia", ["--extra-index-url", f"{index.url}/cpu"]
    assert choose(driver=driver).words == []
    assert choose("cuda").words == ["torch!=2.13.0+cpu", "torchvision!=0.28.0+cpu"]
    assert index.asked == []
    assert choose().words == cpu
    assert choose("cpu", driver=driver).words == [*cpu, "torch==2.13.0+cpu"]
    newer = PINS | {"torch": "2.14.0"}
    assert torch_build.choose_build(sys.executable, newer, None, None).words == [], "the index has another version"


def test_an_index_that_takes_too_long_is_not_waited_for(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_build, "PATIENCE", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the connection is made, and never answered
        monkeypatch.setattr(torch_build, "CPU_INDEX", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert choose().words == []


@pytest.mark.parametrize(("variable", "value"), [("PIP_FIND_LINKS", "/wheels"), ("PIP_NO_INDEX", "1")])
def test_a_pip_that_is_told_where_to_look_is_left_alone(
    index: Index, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert choose().words == []
    assert choose("cpu").words == ["torch==2.13.0+cpu"]
    assert index.asked == []


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


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tools/environment.py, which makes its `.venv` below `tmp_path`."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    module = import_module("environment")
    for name, place in (("ROOT", "."), ("ENVIRONMENT", ".venv"), ("STAMP", ".venv/.installed")):
        monkeypatch.setattr(module, name, tmp_path / place)
    monkeypatch.setattr(module, "make_dotenv", lambda: None)
    monkeypatch.setattr(module, "fingerprint", str)
    monkeypatch.delenv("TORCH", raising=False)
    monkeypatch.delenv("INSTALLER", raising=False)
    return module


def test_a_setup_waits_for_another_and_leaves_what_a_link_leads_to(
    environment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "theirs" / "kept").mkdir(parents=True)
    (tmp_path / ".venv").symlink_to(tmp_path / "theirs")

    def locks(descriptor: int, how: int) -> None:
        if how & fcntl.LOCK_NB:
            raise BlockingIOError

    def create(place: Path, **_: bool) -> None:
        assert not place.is_symlink()
        raise ImportError("import torch: gone")

    monkeypatch.setattr(fcntl, "flock", locks)
    monkeypatch.setattr("venv.create", create)
    assert environment.main() == 1
    output, errors = capfd.readouterr()
    assert output.startswith("setup: waiting for another setup of this directory\n")
    assert errors == "setup: installed, but not usable: import torch: gone\n"
    assert (tmp_path / "theirs" / "kept").is_dir()
    assert not (tmp_path / ".venv").exists()

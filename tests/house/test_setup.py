"""Which torch `make setup` takes: pip itself asks a stand-in of the CPU wheels' index, on this machine's loopback."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.commands import ROOT
from tests.support.processes import HANG
from tools import torch_build

pytestmark = pytest.mark.skipif(find_spec("pip") is None, reason="there is no pip in this environment, as in the image")

PINS = {"torch": "2.13.0", "torchvision": "0.28.0"}

# A build backend in the place of hatchling: the editable wheels that it makes depend on torch, and hold nothing.
BACKEND = """
import zipfile
from pathlib import Path

def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "lab" if Path.cwd().name == "lab" else "project"
    described = f"{name}-1.dist-info"
    with zipfile.ZipFile(Path(folder) / f"{name}-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{described}/METADATA", f"Metadata-Version: 2.1\\nName: {name}\\nVersion: 1\\n"
            "Requires-Dist: torch>=2\\nRequires-Dist: torchvision\\nProvides-Extra: report\\nProvides-Extra: cluster\\n"
            "Provides-Extra: tensorboard\\nProvides-Extra: test\\nProvides-Extra: lint\\n")
        wheel.writestr(f"{described}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{described}/RECORD", "")
    return f"{name}-1-py3-none-any.whl"
"""
# A torch beside which torchvision's compiled operators load, or do not, and a torchvision that asks for them.
TORCH = """
class ops:
    def load_library(path):
        if not {has_operators}:
            raise OSError("undefined symbol")

class library:
    declared = ["nms"] * {has_operators}

    class Library:
        def __init__(self, name, kind):
            assert (name, kind) == ("torchvision", "DEF")

        def define(self, schema):
            library.declared.append(schema.partition("(")[0])
"""
TORCHVISION = """
import torch
if torch.library.declared not in (["nms"], ["nms", "qnms"]):
    raise RuntimeError("operator torchvision::nms does not exist")
"""
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "backend"
[project]
name = "project"
version = "1"
[tool.hatch]
"""


@dataclass
class Index:
    """Package indexes in the form of PEP 503, which are folders: one below `wheels` for each."""

    wheels: Path
    url: str = ""
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """The CPU wheels' index under /cpu, which has torch alone, and an ordinary one under /pypi; pip knows no other."""
    served = Index(tmp_path / "indexes")
    pypi = served.wheels / "pypi"
    for place, version in (("cpu", "2.13.0+cpu"), ("pypi", PINS["torch"])):
        torch = TORCH.format(has_operators=place == "pypi")
        make_wheel(served.wheels / place, "torch", version, **{"torch/__init__.py": torch})
    whole = {"torchvision/__init__.py": TORCHVISION, "torchvision/_C.so": "operators"}
    make_wheel(pypi, "torchvision", PINS["torchvision"], **whole)
    make_wheel(pypi, "hatchling", "1.0", **{"backend.py": BACKEND})

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


def make_wheel(index: Path, name: str, version: str, **files: str) -> None:
    """Write a wheel that holds these files."""
    (index / name).mkdir(parents=True, exist_ok=True)
    described = f"{name}-{version}.dist-info"
    files |= {
        f"{described}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{described}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{described}/RECORD": "",
    }
    with zipfile.ZipFile(index / name / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)


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


@pytest.mark.slow
def test_an_index_without_the_pinned_version_is_not_used(index: Index) -> None:
    (wheel,) = (index.wheels / "cpu" / "torch").iterdir()
    wheel.unlink()
    make_wheel(index.wheels / "cpu", "torch", "2.12.0+cpu")
    assert choose().words == []


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


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ensurepip") is None, reason="this Python makes no environments with pip")
def test_setup_installs_what_was_chosen_and_remakes_what_torch_asks_otherwise(index: Index, tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(ROOT / "tools", project / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    for place in (project, project / "packages" / "lab"):
        place.mkdir(parents=True, exist_ok=True)
        (place / "pyproject.toml").write_text(PROJECT)
    (project / "constraints.txt").write_text("".join(f"{name}=={version}\n" for name, version in PINS.items()))
    hidden = {"PATH": str(tmp_path), "PIP_INDEX_URL": f"{index.url}/pypi", "TORCH_CPU_INDEX": f"{index.url}/cpu"}

    words = [sys.executable, "tools/environment.py"]

    def setup(**settings: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | hidden | settings
        return subprocess.run(
            words, cwd=project, env=environment, capture_output=True, text=True, timeout=HANG, check=False
        )

    theirs = tmp_path / "theirs" / "kept"
    theirs.mkdir(parents=True)
    (project / ".venv").symlink_to(theirs.parent)
    # The machine that runs this test may have a driver, so even the first call says which build it wants.
    made = setup(TORCH="cpu")
    assert made.returncode == 0, made.stderr
    assert theirs.is_dir()
    assert not (project / ".venv").is_symlink()
    assert made.stdout.splitlines()[1:] == [
        f"setup: TORCH=cpu, so torch for the CPU from {index.url}/cpu",
        "setup: this torchvision was built for another torch; `import torchvision` works, but its compiled operators "
        "(torchvision.ops.nms, roi_align …) do not",
        "setup: done, with torch 2.13.0+cpu",
    ]
    imported = [project / ".venv" / "bin" / "python", "-c", "import torchvision"]
    subprocess.run(imported, env=os.environ | hidden, timeout=HANG, check=True)
    for kept in ({}, {"TORCH": "cpu"}):
        assert setup(**kept).stdout == ""
    another = os.open(project, os.O_RDONLY)
    fcntl.flock(another, fcntl.LOCK_EX)
    environment = os.environ | hidden | {"TORCH": "cpu"}
    with subprocess.Popen(words, cwd=project, env=environment, stdout=subprocess.PIPE, text=True) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "setup: waiting for another setup of this directory\n"
        os.close(another)
        assert waiting.stdout.read() == ""
    remade = setup(TORCH="cuda")
    assert remade.returncode == 0, remade.stderr
    assert remade.stdout.splitlines()[1:] == ["setup: TORCH=cuda, so torch for CUDA", "setup: done, with torch 2.13.0"]
    assert not [*project.glob(".venv/lib/python3*/site-packages/torchvision_hook*")]
    make_wheel(index.wheels / "pypi", "torchvision", PINS["torchvision"], **{"torchvision/__init__.py": "import gone"})
    broken = setup(TORCH="cpu")
    assert broken.returncode == 1
    assert broken.stderr == (
        "setup: installed, but not usable: import torchvision: ModuleNotFoundError: No module named 'gone'\n"
    )
    assert "done" not in broken.stdout
    wrong = setup(TORCH="rocm")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "setup: TORCH=rocm: use TORCH=cpu or TORCH=cuda, or leave it out and the machine decides\n"
    nobody = setup(INSTALLER="conda")
    assert nobody.returncode == 2
    assert "use INSTALLER=uv" in nobody.stderr

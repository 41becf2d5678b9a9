"""`ddp verify --rebuild`: what the new environment gets and whose word counts there, and what cannot be had.

A stand-in for uv plays what an index and its Pythons would answer; one test asks a real one.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile, ZipInfo

import pytest
from packaging.requirements import Requirement

from ddp_core.base.errors import ExitCode
from ddp_core.cli.bundle import make_bundle
from ddp_core.cli.verify import verify
from ddp_core.record.bundles import BUNDLE_FORMAT, MANIFEST, PINS
from ddp_core.record.pins import read_pins
from tests.support.commands import ROOT, ddp, train, trained
from tests.support.own_project import write_project
from tests.support.wording import refusing

BUNDLE = ROOT / "tests" / "formats" / "0.1.0" / "bundle.zip"
"""A bundle of an earlier version, whose pins do not say which files their wheels have."""
WHERE = {"layout": "dp", "device": None, "nproc_per_node": 2, "data_dir": None}

# Makes an environment whose Python says how it was called, and that has one package.
UV = """#!/bin/sh
echo "$@" >>UV_ASKED
for last; do :; done
case $1 in
venv)
  info=$last/lib/python3.11/site-packages/click-8.1.8.dist-info
  mkdir -p $last/bin $info
  printf 'Name: click\\nVersion: 8.1.8\\n' >$info/METADATA
  printf 'click/core.py,sha256=abc,7\\nclick-8.1.8.dist-info/INSTALLER,sha256=def,3\\n' >$info/RECORD
  printf '#!/bin/sh\\necho asked $*\\nls $PYTHONPATH\\necho different\\nexit 1\\n' >$last/bin/python
  chmod +x $last/bin/python;;
pip) cat $last >>UV_ASKED;;
esac
"""
REFUSES = """#!/bin/sh
[ $1 = COMMAND ] || exit 0
printf 'error: No solution found\\n  cause: there is no version of it\\n  cause: more\\n' >&2
exit 1
"""
FILES = hashlib.sha256(b"click/core.py,sha256=abc").hexdigest()


def altered(bundle: Path, target: Path, change: Callable[[str], str], member: str = PINS) -> Path:
    """The bundle with other pins, or another change, and a MANIFEST that fits."""
    with ZipFile(bundle) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members[member] = change(members[member].decode()).encode()
    digests = {name: hashlib.sha256(members[name]).hexdigest() for name in sorted(members.keys() - {MANIFEST})}
    members[MANIFEST] = "".join(f"{digest}  {name}\n" for name, digest in digests.items()).encode()
    with ZipFile(target, "w") as archive:
        archive.comment = BUNDLE_FORMAT.encode()
        for name, content in members.items():
            archive.writestr(ZipInfo(name), content)
    return target


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Put a program in the place of uv; returns the file into which the stand-in writes what it was asked."""

    def put(program: str) -> Path:
        asked = tmp_path / "asked"
        stands_in = tmp_path / "uv"
        stands_in.write_text(program.replace("UV_ASKED", str(asked)))
        stands_in.chmod(0o755)
        monkeypatch.setattr(shutil, "which", lambda *_, **__: str(stands_in))
        return asked

    monkeypatch.delenv("UV_FIND_LINKS", raising=False)
    return put


def test_what_it_needs_is_said_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uv: Callable[[str], Path]
) -> None:
    uv(UV)
    with refusing():
        verify(tmp_path, rebuild=True, **WHERE)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with refusing():
        verify(BUNDLE, rebuild=True, **WHERE)


def test_the_pins_are_installed_and_this_ddp_is_lent_alone(
    tmp_path: Path, uv: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    asked = uv(UV)
    text = f"# Python\n--index-url http://evil\n# samebits==0.1.0\nclick==8.1.8  # files {FILES}\ntorch==2.13.0+cpu\n"
    bundle = altered(BUNDLE, tmp_path / "b.zip", lambda _: text)
    assert verify(bundle, rebuild=True, **WHERE) == 1
    making, install, *wanted = asked.read_text().splitlines()
    assert re.fullmatch(r"venv --quiet --python 3\.11 /\S+/venv", making)
    assert re.fullmatch(
        r"pip install --quiet --python \S+ --torch-backend cpu --no-deps --no-build --requirement \S+", install
    )
    assert wanted == ["click==8.1.8", "torch==2.13.0+cpu"], "no option of pip's that a stranger has written"
    said = capfd.readouterr().out.splitlines()
    assert said[0].startswith("making Python 3.11 with the 3 packages")
    assert said[1] == f"asked -m ddp_core verify {bundle} --layout dp --nproc-per-node 2"
    assert said[2:-1] == ["ddp_core", f"samebits-{metadata.version('samebits')}.dist-info"]
    assert said[-1] == "different"
    assert not Path(making.split()[-1]).parent.exists(), "it is removed again"


def test_an_end_without_a_verdict_is_no_difference(tmp_path: Path, uv: Callable[[str], Path]) -> None:
    uv(UV.replace("echo different", "echo nothing"))
    pins = f"# samebits==0.1.0\nclick==8.1.8  # files {FILES}\n"
    with refusing() as caught:
        verify(altered(BUNDLE, tmp_path / "b.zip", lambda _: pins), rebuild=True, **WHERE)
    assert caught.value.exit_code == ExitCode.INTERNAL  # type: ignore[attr-defined]
    with refusing():
        verify(altered(BUNDLE, tmp_path / "c.zip", lambda text: f"{text}torch 3\n"), rebuild=True, **WHERE)


@pytest.mark.parametrize(
    ("program", "change"),
    [
        pytest.param(REFUSES.replace("COMMAND", "venv"), str, id="no Python"),
        pytest.param(REFUSES.replace("COMMAND", "pip"), str, id="no version"),
        pytest.param(UV, lambda text: f"{text}# mine==3\n", id="from a folder"),
        pytest.param(UV, lambda _: f"click==8.1.8  # files {FILES[::-1]}\n# samebits==1\n", id="another build"),
    ],
)
def test_what_cannot_be_had_is_named(
    program: str, change: Callable[[str], str], tmp_path: Path, uv: Callable[[str], Path]
) -> None:
    uv(program)
    bundle = altered(BUNDLE, tmp_path / "b.zip", change)
    with refusing() as caught:
        verify(bundle, rebuild=True, **WHERE)
    assert caught.value.exit_code == ExitCode.RESOURCES  # type: ignore[attr-defined]


def test_a_place_is_no_python(tmp_path: Path, uv: Callable[[str], Path]) -> None:
    asked = uv(UV)
    bundle = altered(
        BUNDLE, tmp_path / "b.zip", lambda text: text.replace('"python": "3.', '"python": "/tmp/3.'), "run.json"
    )
    with refusing():
        verify(bundle, rebuild=True, **WHERE)
    assert not asked.exists()


def needed(name: str, known: dict[str, str]) -> dict[str, str]:
    """The installed packages without which this one does not work, by version."""
    name = re.sub(r"[-_.]+", "-", name).lower()
    if name not in known:
        known[name] = metadata.version(name)
        for line in metadata.requires(name) or ():
            asked = Requirement(line)
            if asked.marker is None or asked.marker.evaluate({"extra": ""}):
                needed(asked.name, known)
    return known


def reaches(host: str) -> bool:
    try:
        with socket.create_connection((host, 443), timeout=5):
            return True
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.extras("uv")
@pytest.mark.timeout(900)
def test_a_bundle_is_verified_in_an_environment_of_its_own(tmp_path: Path) -> None:
    if not reaches("pypi.org"):
        pytest.skip("the package index cannot be reached")
    train(tmp_path / "out", write_project(tmp_path / "project"))
    assert make_bundle(trained(tmp_path / "out")[0].path, tmp_path / "whole.zip") == 0
    names = needed("samebits", {})

    def fewer(text: str) -> str:
        return "".join(f"{line}\n" for line in text.splitlines() if read_pins(line).keys() & names)

    bundle = altered(tmp_path / "whole.zip", tmp_path / "b.zip", fewer)
    links = {"UV_FIND_LINKS": os.environ["PIP_FIND_LINKS"]} if "PIP_FIND_LINKS" in os.environ else {}
    environment = links | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    ended = ddp("verify", bundle, "--rebuild", "--layout", "dp", "--json", env=environment)
    assert ended.code == 0, ended.errors + ended.output
    assert f"packages: all {len(names)} packages and Python are those of the pins" in ended.output
    assert "identical" in ended.output

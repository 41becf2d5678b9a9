"""What `pip install` of the wheels brings, what their pages say, and that both are built the same each time."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

from ddp_core.record.directory import find_runs
from tests.house.conftest import build, run
from tests.support.commands import ROOT
from tests.support.layout_cases import ADAMW_MLP

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PLACE = "https://example.org/somebody/samebits"

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


def files_of(wheel: Path) -> dict[str, bytes]:
    """The files that a wheel puts beside other packages, but for its own description."""
    with zipfile.ZipFile(wheel) as packed:
        return {name: packed.read(name) for name in packed.namelist() if ".dist-info/" not in name}


def page_of(wheel: Path) -> Message:
    """What a wheel says of itself."""
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(packed.read(name))


def below(folder: Path) -> dict[str, bytes]:
    """The files below a folder of the working tree, without what Python has left there."""
    files = (file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


@pytest.mark.full
def test_the_wheels_hold_their_packages_whole_and_no_name_that_could_be_anybodys(built: dict[str, Path]) -> None:
    library, lab = files_of(built["library"]), files_of(built["lab"])
    assert library == {
        **{f"ddp_core/{name}": content for name, content in below(ROOT / "ddp_core").items()},
        "samebits.py": (ROOT / "samebits.py").read_bytes(),
    }
    assert {"ddp_core/py.typed", "ddp_core/data/texts/alice.txt"} <= library.keys()
    assert "ddp_lab/py.typed" in lab
    assert lab == {
        **{f"ddp_lab/{name}": content for name, content in below(ROOT / "ddp_lab").items()},
        **{f"ddp_lab/launch/{name}": content for name, content in below(ROOT / "launch").items()},
        **{f"ddp_experiments/{name}": content for name, content in below(ROOT / "experiments").items()},
    }


def test_there_is_one_version_number(built: dict[str, Path]) -> None:
    version, (library, lab) = PROJECT["version"], (page_of(built[name]) for name in ("library", "lab"))
    assert library["Version"] == lab["Version"] == version
    assert lab.get_all("Requires-Dist") == [f"samebits[lab]=={version}"]
    assert f"\nARG VERSION={version}\n" in (ROOT / "Dockerfile").read_text()
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"This is version {version} " in (ROOT / "README.md").read_text()
    assert re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == version


def test_the_page_on_the_index_has_no_link_that_leads_nowhere(built: dict[str, Path]) -> None:
    """Where the repository can be read is said by whoever publishes; without that, its files are not linked."""

    def links(text: str) -> set[str]:
        return {target for target in re.findall(r"\]\(([^)]+)\)", text) if target[0] != "#"}

    readme = links((ROOT / "README.md").read_text())
    elsewhere = {target for target in readme if target.startswith("https://")}
    assert links(str(page_of(built["library"]).get_payload())) == elsewhere
    published = json.loads(run(ROOT, sys.executable, "-m", "hatchling", "metadata", REPOSITORY_URL=PLACE).stdout)
    files = f"{PLACE}/blob/v{PROJECT['version']}/"
    for target in {*links(published["readme"]["text"]) - elsewhere, *published["urls"].values()} - {PLACE}:
        assert target.startswith((files, f"{PLACE}/issues"))
        name = target.removeprefix(files).partition("#")[0].removesuffix("?raw=true")
        assert target == f"{PLACE}/issues" or (ROOT / name).exists(), target
    assert published["urls"]["Homepage"] == PLACE


@pytest.mark.slow
def test_two_builds_are_the_same_to_the_byte_and_so_is_one_from_the_sdist(
    built: dict[str, Path], tmp_path: Path
) -> None:
    again = build(tmp_path / "again")
    assert {name: file.read_bytes() for name, file in again.items()} == {
        name: file.read_bytes() for name, file in built.items()
    }
    with tarfile.open(built["source"]) as packed:
        packed.extractall(tmp_path, filter="data")
    source = tmp_path / f"samebits-{PROJECT['version']}"
    for name in ("CHANGELOG.md", "tests/conftest.py", "docs/README.md", "launch/slurm/train.sh", "Makefile"):
        assert (source / name).is_file(), name
    for name, place in (("library", source), ("lab", source / "packages" / "lab")):
        run(place, sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", tmp_path / "last")
        assert (tmp_path / "last" / built[name].name).read_bytes() == built[name].read_bytes()


@pytest.mark.extras("twine", "pyroma")
def test_an_index_takes_what_is_built_and_its_readers_miss_nothing(tmp_path: Path) -> None:
    files = build(tmp_path, REPOSITORY_URL=PLACE, CONTACT_EMAIL="somebody@example.org")
    run(tmp_path, sys.executable, "-m", "twine", "check", "--strict", *files.values())
    rated = run(tmp_path, sys.executable, "-m", "pyroma", "--file", files["source"]).stdout
    assert "Final rating: 10/10" in rated, rated


@pytest.mark.slow
def test_installed_wheels_list_and_train_from_an_empty_directory(installed: Path, tmp_path: Path) -> None:
    listed = {line.split()[0] for line in run(tmp_path, installed / "ddp", "list").stdout.splitlines()}
    assert listed == {file.stem for file in (ROOT / "experiments").glob("*.py")}

    shutil.copy(ADAMW_MLP, tmp_path / "mine.py")
    done = run(tmp_path, installed / "python", "-c", TRAIN)
    assert all(line.startswith("ddp: rehearsed in ") for line in done.stderr.splitlines()), done.stderr
    records = [record for _, record in find_runs(tmp_path / "outputs")]
    assert sorted(record["experiment"]["name"] for record in records) == ["adamw_mlp", "digits"]
    assert {record["status"] for record in records} == {"completed"}
    run(tmp_path, installed / "ddp", "launch-files")
    assert below(tmp_path / "launch") == below(ROOT / "launch")

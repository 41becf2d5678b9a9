"""A finished run as one file: what is in it, that it is verified elsewhere, and which files are refused.

Tests record/bundles.py, too.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, ZipInfo

import pytest
import torch
from safetensors.torch import load_file, save_file

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.cli.bundle import BUNDLE_FORMAT, make_bundle
from ddp_core.cli.verify import verify
from ddp_core.record.bundles import unpack_bundle
from ddp_core.record.directory import RunDirectory
from tests.support.commands import ddp, train, trained
from tests.support.mounts import tmpfs
from tests.support.own_project import write_project
from tests.support.wording import refusing

NAMES = [
    *("MANIFEST", "README.txt", "data.json", "log.txt", "metrics.jsonl", "model.safetensors", "pins.txt", "run.json"),
    *("source/beside.py", "source/mine.py", "source/nets/__init__.py", "source/nets/big.py"),
]

AS_RECORDED = {"layout": None, "device": None, "nproc_per_node": None, "data_dir": None}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a user's own files, which are gone since."""
    folder = tmp_path_factory.mktemp("handed-over")
    train(folder / "out", write_project(folder / "project"))
    shutil.rmtree(folder / "project")
    return trained(folder / "out")[0].path


@pytest.fixture(scope="module")
def packed(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's bundle."""
    target = tmp_path_factory.mktemp("bundle") / "mine.zip"
    assert make_bundle(run, target) == 0
    return target


def again(packed: Path, target: Path, change: Callable[[dict[str, bytes]], object]) -> Path:
    """The bundle with other members."""
    with ZipFile(packed) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with ZipFile(target, "w") as archive:
        archive.comment = BUNDLE_FORMAT.encode()
        for name, content in members.items():
            archive.writestr(ZipInfo(name), content)
    return target


def test_a_disk_that_is_full_while_a_bundle_is_unpacked_is_no_damage(packed: Path, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "size=8k") as small, pytest.raises(UserError, match="disk full") as failure:
        unpack_bundle(packed, small)
    assert failure.value.exit_code == ExitCode.RESOURCES


def test_the_same_run_gives_the_same_bytes(run: Path, packed: Path, tmp_path: Path) -> None:
    assert make_bundle(run, tmp_path / "another.zip") == 0
    assert (tmp_path / "another.zip").read_bytes() == packed.read_bytes()
    assert list(tmp_path.iterdir()) == [tmp_path / "another.zip"]
    with ZipFile(packed) as archive:
        assert archive.namelist() == NAMES
        assert {member.compress_type for member in archive.infolist()} == {ZIP_STORED}
        lines = archive.read("MANIFEST").decode().splitlines()
        assert lines == [f"{hashlib.sha256(archive.read(name)).hexdigest()}  {name}" for name in NAMES[1:]]
        assert json.loads(archive.read("run.json")) == RunDirectory(run).read()


def test_a_bundle_is_verified_where_nothing_else_is(packed: Path, tmp_path: Path) -> None:
    ended = ddp("verify", packed, "--json", "--layout", "dp", "--data-dir", tmp_path, module="tests.support.quick")
    assert (ended.code, ended.errors) == (0, "")
    said = json.loads(ended.output)["lines"]
    assert said[0] == "bundle: 12 files, each as MANIFEST says"
    assert said[1].startswith("packages: all ")
    assert said[2] == "this runs the code in the bundle"
    assert said[-1] == "identical"


@pytest.mark.slow
def test_initial_weights_go_along(run: Path, packed: Path, tmp_path: Path) -> None:
    file = write_project(tmp_path / "project")
    weights = Path(shutil.copy(run / "model.safetensors", tmp_path / "first.safetensors"))
    train(tmp_path / "out", file, "--init-from", weights)
    assert make_bundle(trained(tmp_path / "out")[0].path, tmp_path / "b.zip") == 0
    weights.rename(tmp_path / "away")
    with ZipFile(tmp_path / "b.zip") as archive:
        assert "init_from.safetensors" in archive.namelist()
        assert "the weights that the run began with" in archive.read("README.txt").decode()
    ended = ddp("verify", tmp_path / "b.zip", module="tests.support.quick")
    assert (ended.code, ended.output.splitlines()[-1]) == (0, "identical"), ended.errors + ended.output
    with refusing():
        make_bundle(trained(tmp_path / "out")[0].path, tmp_path / "c.zip")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda members: members.update({"source/beside.py": b"evil()"}), "source/beside.py was changed"),
        (lambda members: members.pop("metrics.jsonl"), "metrics.jsonl is missing"),
        (lambda members: members.update({"source/more.py": b""}), "source/more.py is not in MANIFEST"),
    ],
)
def test_a_changed_member_is_named_and_nothing_is_run(
    change: Callable[[dict[str, bytes]], object], said: str, packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert verify(again(packed, tmp_path / "changed.zip", change), **AS_RECORDED) == 1
    output = capsys.readouterr().out
    assert output.startswith(f"different bundle: {said}")
    assert "this runs" not in output


def test_a_flipped_bit_is_named(packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = bytearray(packed.read_bytes())
    with ZipFile(packed) as archive:
        member = archive.getinfo("model.safetensors")
    content[member.header_offset + 500] ^= 1
    (tmp_path / "flipped.zip").write_bytes(content)
    assert verify(tmp_path / "flipped.zip", **AS_RECORDED) == 1
    assert "model.safetensors was changed after the bundle was made" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["../evil.py", "/evil.py", "source/../../evil.py", "a\\evil.py", "./evil.py", "a/"])
def test_places_outside_are_refused(name: str, packed: Path, tmp_path: Path) -> None:
    with refusing():
        verify(again(packed, tmp_path / "evil.zip", lambda members: members.update({name: b""})), **AS_RECORDED)


def test_what_would_grow_is_refused(packed: Path, tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.zip"
    with ZipFile(bomb, "w", ZIP_DEFLATED) as archive:
        archive.comment = BUNDLE_FORMAT.encode()
        archive.writestr("zeros", bytes(10_000_000))
    with refusing():
        verify(bomb, **AS_RECORDED)

    # Two entries of the directory that mean the same bytes.
    with ZipFile(bomb, "w") as archive:
        archive.comment = BUNDLE_FORMAT.encode()
        archive.writestr("zeros", bytes(100_000))
        twin = ZipInfo("more")
        for field in ("header_offset", "CRC", "compress_size", "file_size"):
            setattr(twin, field, getattr(archive.infolist()[0], field))
        archive.filelist.append(twin)
        archive.NameToInfo["more"] = twin
    with refusing():
        verify(bomb, **AS_RECORDED)


def test_what_is_no_bundle_is_refused(packed: Path, tmp_path: Path) -> None:
    file = tmp_path / "file.zip"
    file.write_text("nothing")
    with pytest.raises(UserError, match="is not a bundle, or is damaged"):
        verify(file, **AS_RECORDED)
    with ZipFile(file, "w") as archive:
        archive.writestr("run.json", "{}")
    with refusing():
        verify(file, **AS_RECORDED)
    file.write_bytes(packed.read_bytes()[:-40])
    with pytest.raises(UserError, match="is not a bundle, or is damaged"):
        verify(file, **AS_RECORDED)
    with pytest.raises(UserError, match=r"is not a bundle, or is damaged: .*MANIFEST"):
        verify(again(packed, file, lambda members: members.pop("MANIFEST")), **AS_RECORDED)
    shutil.copy(packed, file)
    with ZipFile(file, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("run.json", b"{}")
    with refusing():
        verify(file, **AS_RECORDED)


def test_what_cannot_be_handed_over_is_said(run: Path, tmp_path: Path) -> None:
    existing = tmp_path / "existing.zip"
    existing.touch()
    with refusing():
        make_bundle(run, existing)
    with refusing():
        make_bundle(run, run / "b.zip")
    with refusing():
        make_bundle(run, tmp_path / "missing" / "b.zip")
    copy = RunDirectory(Path(shutil.copytree(run, tmp_path / "copy")))
    (copy.path / "source" / "beside.py").write_text("")
    with refusing():
        make_bundle(copy.path, tmp_path / "b.zip")
    copy.update(status="stopped")
    with refusing():
        make_bundle(copy.path, tmp_path / "b.zip")
    assert not (tmp_path / "b.zip").exists()


def test_nothing_is_packed_before_its_weights_are_those_of_the_record(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    weights = copy / "model.safetensors"
    save_file({name: torch.zeros_like(value) for name, value in load_file(weights).items()}, weights)
    with refusing():
        make_bundle(copy, tmp_path / "b.zip")
    weights.unlink()
    with refusing():
        make_bundle(copy, tmp_path / "b.zip")
    assert list(tmp_path.iterdir()) == [copy]


def test_a_name_that_is_no_utf_8_is_refused_and_in_a_text_written_as_it_is(run: Path, tmp_path: Path) -> None:
    copy = RunDirectory(Path(shutil.copytree(run, tmp_path / "copy")))
    copy.update(question="What is in \udcff.txt?")
    assert make_bundle(copy.path, tmp_path / "b.zip") == 0
    with ZipFile(tmp_path / "b.zip") as archive:
        assert b"What is in \xff.txt?" in archive.read("README.txt")
    source = copy.read()["source"]
    shutil.copy(copy.path / "source" / "beside.py", copy.path / "source" / "\udcff.py")
    copy.update(source=source | {"files": source["files"] | {"\udcff.py": source["files"]["beside.py"]}})
    with refusing():
        make_bundle(copy.path, tmp_path / "c.zip")


def test_the_command_names_the_file_after_the_run(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = ddp("bundle", run, "-o", tmp_path / "b.zip")
    assert (ended.code, ended.errors) == (0, "")
    size = (tmp_path / "b.zip").stat().st_size
    assert ended.output.startswith(f"{tmp_path}/b.zip: 12 files, {size:,} bytes, sha256 ")
    monkeypatch.chdir(tmp_path)
    assert make_bundle(run, None) == 0
    assert (tmp_path / f"mine-{run.name}.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


def test_a_broken_promise_goes_with_the_bundle(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    shutil.copytree(run, path)
    RunDirectory(path).update(promise_broken={"step": 3, "what": "other bits", "attempt": 0})
    assert make_bundle(path, tmp_path / "broken.zip") == 0
    assert "note: promise broken in step 3: other bits. The bundle says so" in capsys.readouterr().out
    with ZipFile(tmp_path / "broken.zip") as archive:
        assert "PROMISE_BROKEN.txt" in archive.read("MANIFEST").decode()
        assert archive.read("PROMISE_BROKEN.txt").decode().startswith("promise broken in step 3: other bits\n")
        readme = archive.read("README.txt").decode()
    assert "\n\nBut: promise broken in step 3: other bits\n" in readme
    ended = ddp("verify", tmp_path / "broken.zip", module="tests.support.quick")
    assert ended.code == 0, ended.errors
    assert "note: promise broken in step 3: other bits" in ended.output
    assert ended.output.endswith("identical, but promise broken in step 3\n")

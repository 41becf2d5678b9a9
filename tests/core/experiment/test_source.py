"""Which files count as the user's code, how they are kept and served, and when code counts as changed.

Tests experiment/kept_source.py, too.
"""

from __future__ import annotations

import importlib
import importlib.util
import py_compile
from pathlib import Path
from typing import Any

import pytest

from ddp_core.experiment.file import INSTALLED, Served, load_experiment
from ddp_core.experiment.kept_source import changed_files, diff, read_source, serve_modules, shortened
from ddp_core.experiment.source import Source, collect
from tests.support.own_project import BESIDE, write_project
from tests.support.processes import ask
from tests.support.wording import refusing


def collected(file: Path, *first: str) -> Source:
    """What is collected after the lines `first` were put before those of the file; asked in a process of its own."""
    if first:
        file.write_text("\n".join(first) + "\n" + file.read_text())
    return Source(*ask(_collect, file))


def _collect(file: Path) -> tuple[Any, ...]:
    source = collect(load_experiment(str(file)))
    return source.experiment, dict(source.texts), dict(source.modules), source.unreadable


def test_the_file_its_neighbours_and_packages_are_collected(tmp_path: Path) -> None:
    source = collected(write_project(tmp_path))
    assert source.experiment == "mine.py"
    assert source.files.keys() == {"mine.py", "beside.py", "nets/__init__.py", "nets/big.py"}
    assert source.modules == {"beside": "beside.py", "nets": "nets/__init__.py", "nets.big": "nets/big.py"}
    assert source.texts["beside.py"] == BESIDE.encode()
    assert source.unreadable == ()


def test_a_shipped_experiment_is_one_file() -> None:
    source = collected(INSTALLED / "digits.py")
    assert (source.files.keys(), source.modules) == ({"digits.py"}, {})


def test_modules_from_elsewhere_have_the_place_of_their_name(tmp_path: Path) -> None:
    other = tmp_path / "other" / "tools" / "deep"
    other.mkdir(parents=True)
    (other / "cut.py").write_text("EDGE = 1\n")  # `tools` and `tools.deep` are namespace packages
    (tmp_path / "other" / "beside.py").write_text(BESIDE + "EDGE = 2\n")
    (tmp_path / "apart").mkdir()
    (tmp_path / "apart" / "big.py").symlink_to(other / "cut.py")
    file = write_project(tmp_path / "project")
    source = collected(
        file,
        "import importlib.util, sys",
        f"sys.path[:0] = [{str(tmp_path / 'other')!r}, {str(tmp_path / 'apart')!r}]",
        "import tools.deep.cut, big as linked",
    )
    assert source.modules["tools.deep.cut"] == "tools/deep/cut.py"
    assert source.modules["big"] == "big.py"
    assert source.modules["beside"] == "beside.py"
    assert source.texts["beside.py"].endswith(b"EDGE = 2\n"), "the one that was imported"


def test_two_files_of_one_place_are_both_kept(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.py").write_text("EDGE = 2\n")
    file = write_project(tmp_path / "project")
    source = collected(file, "import sys", f"sys.path.insert(0, {str(tmp_path / 'other')!r})", "import mine")
    assert source.texts["elsewhere/mine.py"] == b"EDGE = 2\n"
    assert source.modules["mine"] == "elsewhere/mine.py"


def test_what_cannot_be_read_or_decoded_does_no_harm(tmp_path: Path) -> None:
    file = write_project(tmp_path)
    (tmp_path / "gone.py").write_text("import pathlib\npathlib.Path(__file__).unlink()\n")
    (tmp_path / "latin.py").write_bytes("# coding: latin-1\nWORD = 'ü'\n".encode("latin-1"))
    source = collected(file, "import gone, latin, sys, types", "sys.modules['odd'] = None", "sys.modules['flat'] = 5")
    assert source.unreadable == ("gone",)
    assert b"\xfc" in source.texts["latin.py"]
    assert "\ufffd" in diff(source, Source("mine.py", source.texts | {"latin.py": b"WORD = '\xfe'"}, source.modules))


def test_the_program_that_was_started_is_no_part_of_the_experiment(tmp_path: Path) -> None:
    file = write_project(tmp_path)
    (tmp_path / "notebook.py").touch()
    source = collected(
        file,
        "import sys, types",
        "module = types.ModuleType('__main__')",
        f"module.__file__ = {str(tmp_path / 'notebook.py')!r}",
        "sys.modules['__main__'] = module",
    )
    assert "notebook.py" not in source.files


def test_kept_modules_are_compiled_from_their_text_alone(tmp_path: Path) -> None:
    """A compiled file beside the text may hold any other code, whatever digest the text has."""
    assert ask(_serve_beside_compiled, tmp_path) == "the text"


def _serve_beside_compiled(folder: Path) -> str:
    (other := folder / "other.py").write_text("WHICH = 'the compiled file'\n")
    (text := folder / "served_text.py").write_text("WHICH = 'the text'\n")
    place = importlib.util.cache_from_source(str(text))
    py_compile.compile(str(other), place, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    serve_modules(Served(str(folder), {"served_text": text.name}))
    return str(importlib.import_module("served_text").WHICH)


def kept(folder: Path) -> dict[str, Any]:
    source = collected(write_project(folder / "project"))
    source.write(folder / "source")
    return source.to_json("source")


def test_a_kept_source_that_was_touched_is_refused(tmp_path: Path) -> None:
    recorded = kept(tmp_path)
    assert read_source(tmp_path, recorded).to_json("source") == recorded
    (tmp_path / "source" / "beside.py").write_text(BESIDE + "\n")
    with refusing():
        read_source(tmp_path, recorded)
    (tmp_path / "source" / "beside.py").unlink()
    with refusing():
        read_source(tmp_path, recorded)


@pytest.mark.parametrize("place", ["../secret", "/etc/passwd", "nets/../../secret"])
def test_a_record_cannot_name_files_outside(tmp_path: Path, place: str) -> None:
    recorded = {"folder": "source", "experiment": "mine.py", "files": {place: "0"}, "modules": {"mine": place}}
    with refusing():
        read_source(tmp_path, recorded | {"unreadable": []})
    with refusing():
        serve_modules(Served(str(tmp_path), recorded["modules"]))


def test_a_record_cannot_name_another_folder_or_an_experiment_without_a_digest(tmp_path: Path) -> None:
    recorded = kept(tmp_path)
    with refusing():
        read_source(tmp_path / "inner", recorded | {"folder": "../source"})
    with refusing():
        read_source(tmp_path, recorded | {"experiment": "other.py"})


@pytest.mark.parametrize(
    ("before", "now", "same"),
    [
        ("a = 1\n", "a = 1\n", True),
        ("a = 1\n", "# why\na  =  1  # so\n", True),
        ("a = 1\n", "a = 2\n", False),
        ("a = 1\n", "a = (\n", False),
        ("a = (\n", "a = (\n\n", False),
    ],
)
def test_comments_and_lines_are_no_other_code(before: str, now: str, same: bool) -> None:
    one, other = (Source("mine.py", {"mine.py": text.encode()}, {}) for text in (before, now))
    assert (changed_files(one.texts, other.texts) == []) is same
    assert (diff(one, other) == "") is same


def test_a_difference_is_shown_by_its_first_lines() -> None:
    before = Source("mine.py", {"mine.py": b"a = 1\nb = 2\nc = 3\n", "old.py": b"x = 1\n"}, {})
    now = Source("mine.py", {"mine.py": b"a = 1\nb = 5\nc = 3\n", "new.py": b"y = 1\n" * 40}, {})
    assert changed_files(before.texts, now.texts) == ["mine.py", "new.py", "old.py"]
    shown = shortened(diff(before, now)).splitlines()
    assert shown[0] == "--- mine.py (the run's)"
    assert {"-b = 2", "+b = 5"} <= set(shown)
    assert len(shown) == 21
    assert shown[-1].startswith("… and ")

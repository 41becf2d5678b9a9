"""`make which-tests` finds the tests of a file in a recorded map, and `make record-tests` records all processes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT
from tests.support.processes import HANG
from tools import executed_map, which_tests
from tools.executed_map import Recorded

TREE = "def plant():\n    return 1\n\n\ndef fell():\n    return 2\n"
MANY = [f"tests/test_{number:02}.py" for number in range(20)]
SPECIFIC = "tests/test_tree.py"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a map: `wood/tree.py` is executed by one specific test file and twenty others."""
    files = {"wood/tree.py": TREE, "wood/unused.py": "def nobody():\n    return 3\n", "wood/names.py": "OAK = 1\n"}
    tests = {test: {"wood/tree.py": 1, "wood/other.py": 5} for test in MANY} | {SPECIFIC: {"wood/tree.py": 2}}
    digests = {file: executed_map.digest_of(source) for file, source in files.items() if "def" in source}
    recorded = Recorded(digests | {"wood/other.py": "0"}, tests, ["tests/docker/test_slow.py"])
    for file in (*tests, *recorded.unrecorded):
        files[file] = ""
    for file, content in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(content)
    monkeypatch.setattr(which_tests, "ROOT", tmp_path)
    monkeypatch.setattr(which_tests, "MAP", tmp_path / "map.json")
    (tmp_path / "map.json").write_text(executed_map.text_of(recorded))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_most_specific_tests_come_first_and_a_dozen_are_shown(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert which_tests.main(["wood/tree.py"]) == 0
    said = capsys.readouterr()
    assert said.out == " \\\n  ".join([which_tests.COMMAND, SPECIFIC, *MANY[:11]]) + "\n"
    assert said.err == "… and 9 more (all: make which-tests FILE=wood/tree.py ALL=1)\n"
    assert which_tests.main(["--all", str(project / "wood" / "tree.py")]) == 0
    assert capsys.readouterr() == (" \\\n  ".join([which_tests.COMMAND, SPECIFIC, *MANY]) + "\n", "")


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("", "name a file: make which-tests FILE=ddp_core/reduction/tree.py"),
        ("wood/none.py", "there is no file wood/none.py"),
        ("wood", "there is no file wood"),
        ("map.json", "map.json is no Python file"),
        ("tests/test_tree.py", "tests/test_tree.py belongs to the tests"),
        (__file__, "is outside of this repository"),
        ("wood/broken.py", "wood/broken.py is not Python"),
    ],
)
def test_a_wrong_question_is_answered_with_one_line(
    project: Path, capsys: pytest.CaptureFixture[str], named: str, said: str
) -> None:
    (project / "wood" / "broken.py").write_text("def (:\n")
    assert which_tests.main([named]) == 2
    output, errors = capsys.readouterr()
    assert (output, errors.count("\n")) == ("", 1)
    assert said in errors


@pytest.mark.parametrize("content", [None, "", "[]", '{"files": {}}', '{"files": {}, "tests": {"a": 1}}'])
def test_without_a_map_one_line_says_how_it_is_made(
    project: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    file = project / "map.json"
    file.unlink()
    if content is not None:
        file.write_text(content)
    assert which_tests.main(["wood/tree.py"]) == 2
    output, errors = capsys.readouterr()
    assert (output, errors.count("\n")) == ("", 1)
    assert "`make record-tests` makes it" in errors


def answer(project: Path, file: str) -> which_tests.Answer:
    return which_tests.tests_of(file, executed_map.read(project / "map.json"))


def test_a_new_file_is_answered_with_the_tests_that_name_its_module(project: Path) -> None:
    (project / "wood" / "new.py").write_text("def sow():\n    return 4\n")
    assert answer(project, "wood/new.py").tests == []
    (project / MANY[0]).write_text("from wood.new import sow\n")
    (project / MANY[1]).write_text("from wood import (\n    new,\n)\n")
    (project / MANY[2]).write_text("from wood import newer\n")
    (project / "tests/docker/test_slow.py").write_text("import wood.new\n")
    found = answer(project, "wood/new.py")
    assert found.tests == MANY[:2]
    assert found.notes == [
        "wood/new.py is newer than the recording (`make record-tests`); these tests name it",
        "tests that name it, but are not among the fast ones: tests/docker/test_slow.py",
    ]


def test_a_file_that_no_test_executes_or_that_has_no_functions_is_said_to_be_so(project: Path) -> None:
    assert answer(project, "wood/unused.py") == which_tests.Answer(
        [], ["no fast test executes a function of wood/unused.py; no fast test names it"]
    )
    (project / MANY[0]).write_text("from wood import names\n")
    assert answer(project, "wood/names.py") == which_tests.Answer(
        MANY[:1], ["wood/names.py has no functions; these tests name it"]
    )


def test_new_functions_and_new_tests_are_said_and_a_moved_file_is_found(project: Path) -> None:
    (project / "tests/test_new.py").write_text("import wood.tree\n")
    (project / MANY[0]).unlink()
    tree = project / "wood" / "tree.py"
    tree.write_text(TREE + "\n\ndef climb():\n    return 5\n")
    changed = answer(project, "wood/tree.py")
    assert changed.tests == ["tests/test_new.py", SPECIFIC, *MANY[1:]]
    assert changed.notes == [
        "wood/tree.py has other functions than when the tests were recorded: `make record-tests`",
        "newer than the recording, and first because they name the module: tests/test_new.py",
    ]
    tree.unlink()
    (project / "park").mkdir()
    (project / "park" / "tree.py").write_text(TREE)
    moved = answer(project, "park/tree.py")
    assert moved == which_tests.Answer(
        [SPECIFIC, *MANY[1:]], ["park/tree.py was wood/tree.py when the tests were recorded"]
    )


def test_a_function_has_the_lines_that_import_does_not_execute() -> None:
    source = (
        '@decorated\ndef outer(a=1):\n    """Says."""\n    def inner():\n        return a\n\n    return inner\n\n\n'
    )
    source += "class Some:\n    x = 1\n\n    def short(self): ...\n\n    async def long(self):\n        pass\n"
    found = [(each.name, each.first, each.last) for each in executed_map.functions_of(source)]
    assert found == [("outer", 4, 7), ("outer.inner", 5, 5), ("Some.long", 16, 16)]
    assert executed_map.digest_of(source) != executed_map.digest_of(source.replace("long", "longer"))
    assert executed_map.digest_of(source) == executed_map.digest_of(source.replace("pass", "return"))
    assert executed_map.digest_of("X = 1\n") == ""


@pytest.mark.skipif(not executed_map.MAP.exists(), reason="nothing is recorded: `make record-tests`")
def test_the_kept_map_is_small_and_as_it_is_written() -> None:
    text = executed_map.MAP.read_text()
    assert executed_map.text_of(executed_map.read(executed_map.MAP)) == text
    assert len(text) < 300_000
    assert json.loads(text)["tests"]


CODE = """
import functools


def at_import(function):
    return functools.wraps(function)(lambda: function())


@at_import
def decorated():
    return 1


def here():
    return 2


def forked():
    return 3


def forked_again():
    return 4


def started():
    return 5
"""
FIRST_TEST = """
import multiprocessing
import os
import subprocess
import sys

from wood import code

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["wood.code"])


def work():
    code.forked()
    if child := os.fork():
        os.waitpid(child, 0)
    else:
        code.forked_again()
        os._exit(0)


def test_in_processes():
    process = CONTEXT.Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == 0
    subprocess.run([sys.executable, "-c", "from wood import code; code.started()"], check=True)
"""


@pytest.mark.extras("coverage")
def test_a_recording_has_all_processes_of_a_test_and_nothing_of_the_import(tmp_path: Path) -> None:
    files = {
        "wood/__init__.py": "",
        "wood/code.py": CODE,
        "tests/__init__.py": "",
        "tests/fast.args": "-n\n1\n--dist\nloadfile\n--no-loadscope-reorder\n",
        "tests/test_a.py": FIRST_TEST,
        # The server from which its process is forked was started for the file before.
        "tests/test_b.py": "from tests.test_a import test_in_processes as test_again\n",
        "tests/test_c.py": "from wood import code\n\n\ndef test_here():\n    code.here()\n",
        "tests/test_d.py": "import wood.code\n\n\ndef test_nothing():\n    pass\n",
        "tests/test_e.py": "import pytest\n\npytestmark = pytest.mark.skip\n\n\ndef test_never():\n    pass\n",
    }
    for file, content in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(content)
    shutil.copytree(ROOT / "tools", tmp_path / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "init", "--quiet", "."], cwd=tmp_path, check=True)
    words = [sys.executable, "-m", "tools.record_tests"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=HANG, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    recorded = executed_map.read(tmp_path / "tests" / "executed.json")
    assert recorded.tests == {
        "tests/test_a.py": {"wood/code.py": 3},
        "tests/test_b.py": {"wood/code.py": 3},
        "tests/test_c.py": {"wood/code.py": 1},
        "tests/test_d.py": {},
    }
    assert recorded.unrecorded == ["tests/test_e.py"]

"""The recorded map: which test file executes which functions, kept as tests/executed.json.

tools/record_tests.py makes it and tools/which_tests.py asks it. `files` has the recorded files with a digest of the
names of their functions, `tests` the functions that each test file executes, counted by file, and `unrecorded` the test
files of which no test ran.
"""

from __future__ import annotations

import ast
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
MAP = ROOT / "tests" / "executed.json"


@dataclass(frozen=True)
class Function:
    """A function of a file: its name with those of the classes and functions around it, and the lines of its body.

    The line of `def`, decorators and default values are no part of the body: they are executed at import.
    """

    name: str
    first: int
    last: int


def functions_of(source: str) -> list[Function]:
    """The functions of a file that have lines of their own, each before those inside it."""
    return _functions(ast.parse(source), "")


def _functions(parent: ast.AST, around: str) -> list[Function]:
    found = []
    for node in ast.iter_child_nodes(parent):
        inside = around
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = f"{around}{node.name}."
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
            if body and body[0].lineno > node.lineno:
                found.append(Function(inside.rstrip("."), body[0].lineno, node.end_lineno or body[-1].lineno))
        found += _functions(node, inside)
    return found


def digest_of(source: str) -> str:
    """A digest of the names of the functions; empty if there are none."""
    names = sorted(function.name for function in functions_of(source))
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:8] if names else ""


@dataclass(frozen=True)
class Recorded:
    """What the map says. All paths are relative to the root of the repository, with forward slashes."""

    files: dict[str, str]
    """The digest of each file that has functions."""
    tests: dict[str, dict[str, int]]
    """How many functions of which files each test file executes."""
    unrecorded: list[str]
    """The test files of which no test ran: they need a GPU, Docker, time or another package."""


def read(path: Path) -> Recorded:
    """Read the map. Raises OSError or ValueError if it is not there or is no map."""
    content = json.loads(path.read_text())
    try:
        tests = {
            test: {f"{folder}/{name}": count for folder, names in folders.items() for name, count in names.items()}
            for test, folders in content["tests"].items()
        }
        return Recorded(dict(content["files"]), tests, list(content["unrecorded"]))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name} is not a map of tests: {error!r}") from error


def text_of(recorded: Recorded) -> str:
    """The map as it is kept: sorted, with a line for each test file and folder, so that a change has a small diff."""
    tests = []
    for test, counts in sorted(recorded.tests.items()):
        folders: dict[str, dict[str, int]] = {}
        for file, count in sorted(counts.items()):
            folders.setdefault(str(PurePosixPath(file).parent), {})[PurePosixPath(file).name] = count
        lines = [f"   {json.dumps(folder)}: {json.dumps(names)}" for folder, names in sorted(folders.items())]
        tests.append(
            f"  {json.dumps(test)}: {{\n" + ",\n".join(lines) + "\n  }" if lines else f"  {json.dumps(test)}: {{}}"
        )
    files = [f"  {json.dumps(file)}: {json.dumps(digest)}" for file, digest in sorted(recorded.files.items())]
    parts = {
        "files": "{\n" + ",\n".join(files) + "\n }",
        "tests": "{\n" + ",\n".join(tests) + "\n }",
        "unrecorded": json.dumps(sorted(recorded.unrecorded), indent=2).replace("\n]", "\n ]"),
    }
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {part}" for name, part in parts.items()) + "\n}\n"

"""Prints the tests that execute a file's code, as a command: `make which-tests FILE=ddp_core/reduction/tree.py`.

It asks tests/executed.json, which `make record-tests` makes. The test file comes first of whose executed functions the
largest part lies in the file. A file that nothing is recorded of is answered with the tests that name its module. What
is to be said beside the command goes to standard error. Exit code 1: no test executes or names it. 2: it is no file of
code, or there is no map.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tools.executed_map import MAP, ROOT, Recorded, digest_of, read

SHOWN = 12
"""How many test files are printed without --all."""
# The tests of this list must not find a GPU, and some files hold slow tests, too: tests/fast.args leaves them out.
COMMAND = "CUDA_VISIBLE_DEVICES= .venv/bin/python -m pytest @tests/fast.args"


class NoAnswerError(Exception):
    """The question is wrong, or the map is missing; the message is one line."""


@dataclass
class Answer:
    """The tests to run, the most specific first, and what is to be known about them."""

    tests: list[str]
    notes: list[str] = field(default_factory=list)


def main(arguments: list[str] | None = None) -> int:
    """Print the command; see the docstring of this module for the exit code."""
    parser = argparse.ArgumentParser(
        prog="which-tests", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--all", action="store_true", help=f"all test files, not only the first {SHOWN}")
    parser.add_argument("file", nargs="?", default="", help="a file of code, such as ddp_core/reduction/tree.py")
    options = parser.parse_args(arguments)
    try:
        recorded = _recorded()
        file = _file_of_code(options.file)
        answer = tests_of(file, recorded)
    except NoAnswerError as error:
        print(f"which-tests: {error}", file=sys.stderr)
        return 2
    for note in answer.notes:
        print(f"which-tests: {note}", file=sys.stderr)
    if not answer.tests:
        return 1
    shown = answer.tests if options.all else answer.tests[:SHOWN]
    print(" \\\n  ".join([COMMAND, *shown]))
    sys.stdout.flush()
    if more := len(answer.tests) - len(shown):
        print(f"… and {more} more (all: make which-tests FILE={file} ALL=1)", file=sys.stderr)
    return 0


def tests_of(file: str, recorded: Recorded) -> Answer:
    """The tests of a file, given relative to the root."""
    source = (ROOT / file).read_text()
    try:
        digest = digest_of(source)
    except SyntaxError as error:
        raise NoAnswerError(f"{file} is not Python: {error}") from None
    known, notes = file, []
    if file not in recorded.files and (before := _moved_from(digest, recorded)):
        known = before
        notes.append(f"{file} was {before} when the tests were recorded")
    executing = _most_specific_first(known, recorded)
    if executing:
        if recorded.files[known] != digest:
            notes.append(f"{file} has other functions than when the tests were recorded: `make record-tests`")
        newer = [test for test in _naming(file) if test not in recorded.tests and test not in recorded.unrecorded]
        if newer:
            notes.append(f"newer than the recording, and first because they name the module: {', '.join(newer)}")
        return Answer([*newer, *executing], notes)
    if not digest:
        reason = f"{file} has no functions"
    elif known in recorded.files:
        reason = f"no fast test executes a function of {file}"
    else:
        reason = f"{file} is newer than the recording (`make record-tests`)"
    naming = _naming(file)
    fast = [test for test in naming if test not in recorded.unrecorded]
    notes.append(f"{reason}; {'these tests name it' if fast else 'no fast test names it'}")
    if slower := [test for test in naming if test in recorded.unrecorded]:
        notes.append(f"tests that name it, but are not among the fast ones: {', '.join(slower)}")
    return Answer(fast, notes)


def _recorded() -> Recorded:
    try:
        return read(MAP)
    except FileNotFoundError:
        raise NoAnswerError(f"{MAP.name} is not there; `make record-tests` makes it, in some minutes") from None
    except (OSError, ValueError) as error:
        raise NoAnswerError(f"{MAP.name} cannot be read ({error}); `make record-tests` makes it anew") from None


def _file_of_code(named: str) -> str:
    """The file relative to the root. Raises NoAnswerError for what the map cannot know."""
    if not named:
        raise NoAnswerError("name a file: make which-tests FILE=ddp_core/reduction/tree.py")
    path = next((each for each in (Path(named), ROOT / named) if each.is_file()), None)
    if path is None:
        raise NoAnswerError(f"there is no file {named}")
    file = Path(os.path.relpath(path.resolve(), ROOT)).as_posix()
    if file.startswith("../"):
        raise NoAnswerError(f"{named} is outside of this repository")
    if file.startswith("tests/"):
        raise NoAnswerError(f"{file} belongs to the tests, and the map is of the code that they execute")
    if not file.endswith(".py"):
        raise NoAnswerError(f"{file} is no Python file, and the map is of functions; CONTRIBUTING.md has a table")
    return file


def _most_specific_first(file: str, recorded: Recorded) -> list[str]:
    """The test files that execute functions of the file and are still there."""
    part_in_file = {
        test: counts[file] / sum(counts.values())
        for test, counts in recorded.tests.items()
        if file in counts and (ROOT / test).exists()
    }
    return sorted(part_in_file, key=lambda test: (-part_in_file[test], test))


def _moved_from(digest: str, recorded: Recorded) -> str | None:
    """The only recorded file that has these functions, if it is gone."""
    same = [file for file, other in recorded.files.items() if digest and other == digest]
    return same[0] if len(same) == 1 and not (ROOT / same[0]).exists() else None


def _naming(file: str) -> list[str]:
    """The test files that name a file's module, or its path."""
    package, _, name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".").rpartition(".")
    ways = [re.escape(file)]
    if package:
        listed = r"(?:\([^)]*|[^\n(]*)"
        ways += [rf"{re.escape(package)}\.{name}\b", rf"from {re.escape(package)} import {listed}\b{name}\b"]
    pattern = re.compile("|".join(ways))
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return [test.relative_to(ROOT).as_posix() for test in found if pattern.search(test.read_text())]


if __name__ == "__main__":
    sys.exit(main())

"""Records which functions the fast tests execute, and writes tests/executed.json: `make record-tests`.

The fast tests run once under coverage.py, and so do all processes that they start. Lines outside of functions are not
counted, nor those inside functions that are executed when everything is imported: both are executed by every test.
What a process had executed is lost where SIGKILL ends it. Exit code 1: tests failed; the map has what they executed.
2: the tests could not be run, or coverage.py is missing; the map stays as it was.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tools.executed_map import MAP, ROOT, Recorded, digest_of, functions_of, text_of

if TYPE_CHECKING:
    from coverage import CoverageData

AT_IMPORT = "import"
"""What stands for the name of a test file where everything is imported and nothing else is done."""

# The core named here can change the context, which is the test file, while a process runs; not every core can.
SETTINGS = """\
[run]
core = ctrace
parallel = true
data_file = {folder}/recorded
context = ${{DDP_RECORDED_TEST-}}
include =
{include}
omit = */tools/recording_plugin.py
patch =
    _exit
    fork
disable_warnings =
    no-data-collected
    already-imported
"""
IMPORT_ALL = """\
import contextlib, importlib, sys
for name in sys.argv[1:]:
    with contextlib.suppress(Exception, SystemExit):
        importlib.import_module(name)
"""
_TESTS_FAILED = 1
"""pytest's exit code."""


def main() -> int:
    """Record, and write the map; see the docstring of this module for the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=MAP, help="the map's file (%(default)s)")
    parser.add_argument("tests", nargs="*", help="only these files or folders of tests; by default all fast tests")
    options = parser.parse_args()
    try:
        import coverage  # noqa: F401
    except ImportError:
        print("record-tests: coverage is not installed; `make record-tests` installs it", file=sys.stderr)
        return 2
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ddp-recording-") as folder:
        code = run_recorded(Path(folder), options.tests)
        if code not in (0, _TESTS_FAILED):
            print(f"record-tests: pytest ended with {code}, so {options.output.name} stays as it was", file=sys.stderr)
            return 2
        recorded = summary(combined(Path(folder)))
    options.output.write_text(text_of(recorded))
    size = options.output.stat().st_size / 1000
    print(
        f"record-tests: {len(recorded.tests)} test files and {len(recorded.files)} files of code in {options.output}, "
        f"{size:.0f} kB, {time.monotonic() - began:.0f} s"
    )
    if code:
        print("record-tests: tests failed; of these the map has what they executed until then", file=sys.stderr)
    return code


def python_files() -> list[str]:
    """All Python files of the working tree that git does not ignore, relative to the root."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted(file for file in set(listed) if (ROOT / file).exists())


def code_files() -> list[str]:
    """The files of code: all but the tests, and what belongs to them."""
    return [file for file in python_files() if not file.startswith("tests/")]


def test_files() -> list[str]:
    """The files in which pytest looks for tests."""
    return [file for file in python_files() if file.startswith("tests/") and Path(file).name.startswith("test_")]


def run_recorded(folder: Path, tests: list[str]) -> int:
    """Import everything, then run the tests, each recorded into files in `folder`; return pytest's exit code."""
    settings = folder / "settings.ini"
    # The tests are recorded as well, which shows which of them ran.
    packages = sorted({file.partition("/")[0] for file in python_files() if "/" in file})
    include = "\n".join(f"    {ROOT}/{package}/*" for package in packages)
    settings.write_text(SETTINGS.format(folder=folder, include=include))
    # Tests without the marker gpu are of the CPU: they must not find a GPU.
    environment = os.environ | {"COVERAGE_PROCESS_START": str(settings), "CUDA_VISIBLE_DEVICES": ""}
    modules = [file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in code_files()]
    subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *(name for name in modules if not name.endswith("__main__"))],
        cwd=ROOT,
        env=environment | {"DDP_RECORDED_TEST": AT_IMPORT},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    words = ["-m", "pytest", "@tests/fast.args", "-p", "tools.recording_plugin", "-p", "no:cacheprovider", "-q"]
    return subprocess.run([sys.executable, *words, *tests], cwd=ROOT, env=environment, check=False).returncode


def combined(folder: Path) -> CoverageData:
    """What all processes recorded, together."""
    from coverage import Coverage

    together = Coverage(config_file=str(folder / "settings.ini"))
    together.combine()
    return together.get_data()


def summary(data: CoverageData) -> Recorded:
    """The map of what was recorded."""
    # A process that was forked for one test, from a server that was started for another, has both names in this order.
    names = {context: context.rpartition("|")[2] for context in data.measured_contexts()}
    every = test_files()
    tests: dict[str, dict[str, int]] = {test: {} for test in every if test in names.values()}
    files = {}
    for file in code_files():
        source = (ROOT / file).read_text()
        if not (digest := digest_of(source)):
            continue
        files[file] = digest
        function_of = {
            line: function.name
            for function in functions_of(source)
            for line in range(function.first, function.last + 1)
        }
        executed: dict[str, set[str]] = {}
        for line, contexts in data.contexts_by_lineno(str(ROOT / file)).items():
            if line in function_of and AT_IMPORT not in contexts:
                for context in contexts:
                    executed.setdefault(names[context], set()).add(function_of[line])
        for test in tests.keys() & executed.keys():
            tests[test][file] = len(executed[test])
    return Recorded(files, tests, [test for test in every if test not in tests])


if __name__ == "__main__":
    sys.exit(main())

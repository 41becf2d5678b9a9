"""Lists the lines of ddp_core that only CUDA reaches, and which of them no test executes.

python -m tools.cuda_lines               # counts by file, and the lines that are left
python -m tools.cuda_lines --slow        # with the slow tests of the stand-in, too

Such a line names CUDA or NCCL in its code, or stands below an `if`, a function or a class that does. What executes them
are the tests with the stand-in for CUDA, in tests/gpu_standin; on a GPU none of them need have run. It needs
coverage.py (the extra recording).
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = "tests/gpu_standin"
# Also what forks execute, and processes that end without Python's exit.
SETTINGS = """\
[run]
core = ctrace
parallel = true
data_file = {folder}/recorded
include = {root}/ddp_core/*
patch =
    _exit
    fork
disable_warnings =
    no-data-collected
    already-imported
"""
_NAMES = re.compile(r"cuda|nccl", re.IGNORECASE)


def cuda_lines(source: str) -> set[int]:
    """The lines of a file's functions that only CUDA reaches: for each statement its first line."""
    found: set[int] = set()
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            found |= set(_below(function.body, is_within=bool(_NAMES.search(function.name))))
        elif isinstance(function, ast.ClassDef) and _NAMES.search(function.name):
            methods = [each for each in function.body if isinstance(each, ast.FunctionDef)]
            found |= {line for method in methods for line in _below(method.body, is_within=True)}
    return found


def _below(statements: Iterable[ast.stmt], is_within: bool) -> Iterator[int]:
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.Global | ast.Nonlocal):
            continue  # a function is looked at by itself
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        head, bodies = _parts(statement)
        names = any(_names_cuda(each) for each in head)
        if is_within or names:
            yield statement.lineno
        is_if = isinstance(statement, ast.If) and names and not _has_not(statement.test)
        for place, body in enumerate(bodies):
            yield from _below(body, is_within or (is_if and place == 0))


def _parts(statement: ast.stmt) -> tuple[list[ast.AST], list[list[ast.stmt]]]:
    """What belongs to the statement itself, and the blocks below it."""
    head: list[ast.AST] = []
    bodies: list[list[ast.stmt]] = []
    for _, value in ast.iter_fields(statement):
        if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
            bodies.append(value)
        elif isinstance(value, list):
            for each in value:
                if isinstance(each, ast.ExceptHandler):
                    bodies.append(each.body)
                elif isinstance(each, ast.AST):
                    head.append(each)
        elif isinstance(value, ast.AST):
            head.append(value)
    return head, bodies


def _names_cuda(expression: ast.AST) -> bool:
    """Whether code names CUDA or NCCL; a sentence that does, does not count."""
    for node in ast.walk(expression):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
        if isinstance(node, ast.Constant) and node.value in ("cuda", "nccl"):
            return True
        if name is not None and _NAMES.search(name):
            return True
    return False


def _has_not(test: ast.AST) -> bool:
    """Whether a condition holds where something is not CUDA's: what stands below it, the CPU reaches as well."""
    return any(isinstance(each, ast.Not | ast.NotEq) for each in ast.walk(test))


def executed_by(folder: Path, words: list[str]) -> tuple[int, dict[str, set[int]]]:
    """Run tests under coverage.py, and the processes that they start; pytest's exit code, and the lines by file."""
    from coverage import Coverage

    settings = folder / "settings.ini"
    settings.write_text(SETTINGS.format(folder=folder, root=ROOT))
    # Tests without the marker gpu are of the CPU: they must not find a GPU.
    environment = os.environ | {"COVERAGE_PROCESS_START": str(settings), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "@tests/fast.args", "-p", "no:cacheprovider", "-q", *words]
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    together = Coverage(config_file=str(settings))
    together.combine()
    data = together.get_data()
    return code, {file: set(data.lines(file) or ()) for file in data.measured_files()}


def main() -> int:
    """Print the counts and the lines; the exit code is pytest's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", action="store_true", help="run the slow tests of the stand-in, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ddp-cuda-lines-") as folder:
        slow = ["-m", "not gpu and not gpu2"] if options.slow else []
        code, executed = executed_by(Path(folder), [TESTS, *slow])
    every = missing = 0
    for file in sorted((ROOT / "ddp_core").rglob("*.py")):
        wanted = cuda_lines(file.read_text())
        left = sorted(wanted - executed.get(str(file), set()))
        every, missing = every + len(wanted), missing + len(left)
        lines = file.read_text().splitlines()
        for line in left:
            print(f"{file.relative_to(ROOT)}:{line}: {lines[line - 1].strip()}")
    print(f"{every} lines of ddp_core only CUDA reaches; {every - missing} executed with the stand-in, {missing} not")
    return code


if __name__ == "__main__":
    sys.exit(main())

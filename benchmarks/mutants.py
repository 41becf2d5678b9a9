"""Mutation testing of the code on which results and checkpoints depend: `make mutants`.

    python -m benchmarks.mutants                      all mutants; writes benchmarks/results/mutants.json and the page
    python -m benchmarks.mutants --sample 40          40 of them, always the same ones for one --seed; writes nothing
    python -m benchmarks.mutants --only reduction.tree sampler
    python -m benchmarks.mutants --no-run             report and record what has been run so far

mutmut makes the mutants, small wrong changes, in a copy of the tree (`mutants/`), and runs for each the tests that call
the changed function. Which code and which tests: [tool.mutmut] in pyproject.toml. A run that was interrupted goes on
where it stopped, unless the code or a test has changed since. Exit code 1: a mutant survives whose survival nobody has
argued in benchmarks/accepted_mutants.toml. 2: that file or the run itself is wrong.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import io
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import mutants_page
from benchmarks.record import record, usable_cores

ROOT = Path(__file__).resolve().parent.parent
COPY = ROOT / "mutants"
ACCEPTED = ROOT / "benchmarks" / "accepted_mutants.toml"
MARK = "DDP_MUTANTS_RUN"
# pytest's exit codes, and mutmut's own for "no test" and "out of time"; any other says nothing about the mutant.
OUTCOMES = {0: "survived", 1: "killed", 3: "killed", 5: "not covered", 33: "not covered", 36: "timeout"}
OUT_OF_TIME = (-signal.SIGXCPU, -signal.SIGKILL)


def outcome_of(code: int | None) -> str | None:
    """What the exit code of a mutant's tests says: killed, timeout, survived, not covered, error; None: not run yet."""
    if code is None:
        return None
    if code in OUT_OF_TIME:
        return "timeout"
    return OUTCOMES.get(code, "error") if code >= 0 else "killed"


@dataclass(frozen=True)
class Mutant:
    """One small wrong change, and what became of it."""

    key: str
    """mutmut's name, which numbers the mutants of a function: `mutmut show KEY` works where `mutants/` is."""
    file: Path
    outcome: str | None
    """See `outcome_of`."""

    @property
    def module(self) -> str:
        """The changed module's full name."""
        return self.file.with_suffix("").as_posix().replace("/", ".")

    @property
    def function(self) -> str:
        """The changed function, with its class: `GradientTree.push`."""
        # After mutmut's "x_", or "xǁ" for a method.
        return self.key.rpartition(".")[2].partition("__mutmut_")[0][2:].replace("ǁ", ".")

    def described(self) -> dict[str, Any]:
        """The place, the lines before and after, and a name that stays the same when lines move: plain values."""
        before, after, offset = _change(self.key, self.file)
        line = _first_line(self.file, self.function) + offset
        name = f"{self.module}.{self.function}: {before} -> {after}"
        return {"name": name, "at": f"{self.file}:{line}", "before": before, "after": after}


def _change(key: str, file: Path) -> tuple[str, str, int]:
    """The changed lines before and after, each put into one, and how many lines below its `def` the first one is."""
    from mutmut.mutation.diff_apply import get_diff_for_mutant

    lines = get_diff_for_mutant(key, path=file).splitlines()[2:]
    before: list[str] = []
    after: list[str] = []
    at, start, offset = 0, None, None
    for line in lines:
        if heading := re.match(r"@@ -(\d+)", line):
            at = int(heading[1]) - 1
            continue
        if re.match(r".\s*(async )?def ", line) and start is None:
            start = at
        if line.startswith(("-", "+")):
            (before if line[0] == "-" else after).append(line[1:].strip())
            offset = at if offset is None else offset
        at += line[0] != "+"
    return " ".join(before), " ".join(after), (offset or 0) - (start or 0)


def _first_line(file: Path, function: str) -> int:
    """The line of the function's `def`."""
    nodes: Sequence[ast.AST] = ast.parse((ROOT / file).read_text()).body
    for name in function.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        node = next(node for node in nodes if isinstance(node, kinds) and node.name == name)
        nodes = node.body
    return node.lineno


def prepare(jobs: int) -> None:
    """Make the mutants, unless they are those of this code and these tests already."""
    from mutmut.__main__ import copy_also_copy_files, copy_src_dir, create_mutants

    stamp, wanted = COPY / "code.sha256", _digest()
    if stamp.exists() and stamp.read_text() == wanted:
        return
    shutil.rmtree(COPY, ignore_errors=True)
    COPY.mkdir()
    with contextlib.redirect_stdout(io.StringIO()):
        copy_src_dir()
        copy_also_copy_files()
        create_mutants(jobs)
    (COPY / "commands").touch()
    stamp.write_text(wanted)


def _digest() -> str:
    """Over all that may change what becomes of a mutant."""
    folders = (ROOT / "ddp_core", ROOT / "experiments", ROOT / "tests")
    files = [ROOT / "pyproject.toml"]
    files += sorted(file for folder in folders for file in folder.rglob("*.py"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def found() -> list[Mutant]:
    """All mutants, by file and number."""
    from mutmut.mutation.data import SourceFileMutationData
    from mutmut.utils.file_utils import walk_mutatable_files

    mutants = []
    for file in sorted(walk_mutatable_files()):
        data = SourceFileMutationData(path=file)
        data.load()
        for key, code in data.exit_code_by_key.items():
            mutants.append(Mutant(key, file, outcome_of(code)))
    return mutants


def run(keys: Sequence[str], jobs: int) -> int:
    """Let mutmut run the mutants with these names, or all that have not been run; return its exit code."""
    mark = uuid.uuid4().hex
    paths = os.pathsep.join(filter(None, [str(COPY), os.environ.get("PYTHONPATH")]))
    settings = os.environ | {MARK: mark, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [str(Path(sys.executable).parent / "mutmut"), "run", "--max-children", str(jobs), *keys]
    # On a terminal mutmut shows how far it is; in a file that would be thousands of lines.
    with (COPY / "run.log").open("w") as log:
        output = None if sys.stdout.isatty() else log
        with subprocess.Popen(command, cwd=ROOT, env=settings, stdout=output, stderr=output) as process:
            try:
                code = process.wait()
            except KeyboardInterrupt:
                print("mutants: interrupted; the same command goes on where it stopped", file=sys.stderr)
                return 128 + signal.SIGINT
            finally:
                _end_all(mark)
    if code:
        print(f"mutants: mutmut ended with {code}: {COPY / 'run.log'}", file=sys.stderr)
    return code


def _end_all(mark: str) -> None:
    """Kill every process of the run, wherever it is in the process tree."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                process.kill()


class Accepted:
    """The reasons in benchmarks/accepted_mutants.toml.

    A key is the name of a mutant, or a whole function, or a change that is accepted wherever it is made
    (`strict=True -> strict=False`).
    """

    def __init__(self, reasons: dict[str, str]) -> None:
        self.reasons = reasons
        self._changes = {key: tuple(key.split(" -> ")) for key in reasons if " -> " in key and ": " not in key}

    def reason(self, described: dict[str, Any]) -> str | None:
        """Why this mutant, as `Mutant.described`, may survive; None where nobody has said."""
        name = described["name"]
        for key, (before, after) in self._changes.items():
            if before in described["before"] and described["before"].replace(before, after) == described["after"]:
                return self.reasons[key]
        return self.reasons.get(name, self.reasons.get(name.partition(": ")[0]))

    def unknown(self, mutants: Iterable[Mutant]) -> list[str]:
        """The keys that name a mutant or a function that does not exist (any more)."""
        keys = self.reasons.keys() - self._changes.keys()
        functions = {key.partition(": ")[0] for key in keys}
        near = [mutant for mutant in mutants if f"{mutant.module}.{mutant.function}" in functions]
        there = {f"{mutant.module}.{mutant.function}" for mutant in near}
        return sorted(keys - there - {mutant.described()["name"] for mutant in near})


def report(mutants: Sequence[Mutant], accepted: Accepted) -> dict[str, Any]:
    """Counts by module, and the survivors by name: plain values."""
    survivors = [mutant.described() | {"file": str(mutant.file)} for mutant in mutants if mutant.outcome == "survived"]
    for survivor in survivors:
        survivor["accepted"] = accepted.reason(survivor)
    modules: dict[str, dict[str, Any]] = {}
    for file in sorted({mutant.file for mutant in mutants}):
        outcomes = [mutant.outcome for mutant in mutants if mutant.file == file]
        counts = {name: outcomes.count(name) for name in ("killed", "timeout", "survived", "not covered", "error")}
        argued = sum(one["file"] == str(file) and one["accepted"] is not None for one in survivors)
        run_of_it = len(outcomes) - outcomes.count(None)
        modules[str(file)] = {"mutants": len(outcomes), "run": run_of_it, **counts, "accepted": argued}
        modules[str(file)]["sha256"] = mutants_page.digest_of(str(file))
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {"commit": commit, "modules": modules, "survivors": survivors}


def main(words: Sequence[str]) -> int:
    """Run and report; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, metavar="N", help="run N mutants, drawn by the seed")
    parser.add_argument("--seed", type=int, default=1, help="of the sample (%(default)s)")
    parser.add_argument("--only", nargs="+", default=[], metavar="MODULE", help="such as reduction.tree, or checkpoint")
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="mutants at a time (%(default)s)")
    parser.add_argument("--no-run", action="store_true", help="report and record what was run before")
    asked = parser.parse_args(words)
    os.chdir(ROOT)
    began = time.monotonic()
    if not asked.no_run:
        prepare(asked.jobs)
    prefixes = tuple(f"ddp_core.{name}." for name in asked.only)
    chosen = [mutant for mutant in found() if mutant.key.startswith(prefixes or "")]
    if asked.sample is not None:
        chosen = random.Random(asked.seed).sample(chosen, min(asked.sample, len(chosen)))
    keys = [mutant.key for mutant in chosen if mutant.outcome is None]
    whole = asked.sample is None and not prefixes
    code = 0
    commands = COPY / "commands"
    if not asked.no_run and keys:
        with commands.open("a") as file:
            file.write(shlex.join(["python", "-m", "benchmarks.mutants", *words]) + "\n")
        code = run([] if whole else keys, asked.jobs)
    every = found()
    named = {mutant.key for mutant in chosen}
    accepted = Accepted(tomllib.loads(ACCEPTED.read_text()))
    results = report([mutant for mutant in every if mutant.key in named], accepted)
    print(mutants_page.in_words(results))
    print(f"{time.monotonic() - began:.0f} s")
    unknown = accepted.unknown(every)
    for name in unknown:
        print(f"mutants: {ACCEPTED.relative_to(ROOT)} names a mutant that does not exist: {name}", file=sys.stderr)
    if whole:
        path = record("mutants", "; ".join(dict.fromkeys(commands.read_text().splitlines())), results)
        mutants_page.write()
        print(f"recorded in {path.relative_to(ROOT)}")
    if code or unknown or any(counts["error"] for counts in results["modules"].values()):
        return 2
    return int(any(survivor["accepted"] is None for survivor in results["survivors"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

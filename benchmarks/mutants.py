"""Mutation testing of the code on which results and checkpoints depend: `make mutants`.

    python -m benchmarks.mutants                      all mutants that are new or changed; writes results and page
    python -m benchmarks.mutants --only reduction.tree sampler --minutes 20

mutmut makes the mutants, small wrong changes; tests/support/mutant_runner.py runs for each the fast tests that call the
changed function. Which code and which tests: [tool.mutmut] in pyproject.toml. What became of each mutant is kept in
benchmarks/results/mutants.json, as it comes. One that was killed is not run again while its function and the test that
killed it are unchanged, one whose survival is argued in benchmarks/accepted_mutants.toml while its function is.

Exit code 1: a mutant survives whose survival nobody has argued, or was not run. 2: that file or the run is wrong.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import mutants_page
from benchmarks.mutant_outcomes import ACCEPTED, Accepted, Judged, Kept, Outcome
from benchmarks.mutations import ROOT, Function, Mutant, functions_of, mutants_of, test_digest


def mutated_files(settings: dict[str, Any]) -> list[str]:
    """The files that have mutants, in the order in which [tool.mutmut] names them."""
    found = [sorted(ROOT.glob(pattern)) for pattern in settings["only_mutate"]]
    return [str(path.relative_to(ROOT)) for paths in found for path in paths if path.suffix == ".py"]


SAVE_SECONDS = 2


class Work:
    """What is to be run, and where its outcomes go."""

    def __init__(self, kept: Kept, accepted: Accepted, files: Sequence[str]) -> None:
        self.kept, self._accepted, self._saved = kept, accepted, 0.0
        self._files = [file for file in files if any(self._plan(each) != [] for each in functions_of(file).values())]

    def _plan(self, function: Function) -> list[int] | None:
        return self.kept.plan(function, self._accepted)

    def mutants(self) -> list[Mutant]:
        """The mutants to run; from now on those of new functions count as not run."""
        found = []
        for file in self._files:
            for name, mutants in mutants_of(file).items():
                asked = self._plan(functions_of(file)[name])
                judged = self.kept.functions.get((file, name))
                if asked is None or judged is None or len(judged.outcomes) != len(mutants):
                    sha = functions_of(file)[name].sha
                    self.kept.functions[file, name] = Judged(sha, [Outcome() for _ in mutants])
                    asked = list(range(len(mutants)))
                for mutant in (mutants[number] for number in asked):
                    if self._accepted.by_rule(mutant.change()):
                        self._outcomes(mutant)[mutant.index] = Outcome("left out", None, mutant.change())
                    else:
                        found.append(mutant)
        # Those that have survived before are likely to do so again, after all their tests.
        return sorted(found, key=lambda mutant: self._outcomes(mutant)[mutant.index].kind is not None)

    def _outcomes(self, mutant: Mutant) -> list[Outcome]:
        return self.kept.functions[mutant.function.file, mutant.function.name].outcomes

    def killers(self) -> dict[tuple[str, str], Counter[str]]:
        """Which tests killed how many mutants of a function, in its earlier states, too."""
        counts = {
            place: Counter(outcome.test for outcome in judged.outcomes if outcome.test)
            for place, judged in self.kept.functions.items()
        }
        return {place: tests for place, tests in counts.items() if tests}

    def done(self, mutant: Mutant, kind: str, test: str | None) -> None:
        """Keep an outcome, on the disk within some seconds."""
        function = mutant.function
        change = None if test else mutant.change()
        if test:
            self.kept.tests[test] = test_digest(test) or ""
        self._outcomes(mutant)[mutant.index] = Outcome(kind, test, change)
        if change:
            print(f"{kind}: {function.file}:{function.line + change[0]}: {change[1]} -> {change[2]}", flush=True)
        if time.monotonic() - self._saved > SAVE_SECONDS:
            mutants_page.save(self.kept.plain())
            self._saved = time.monotonic()


def run(work: Work, mutants: Sequence[Mutant], settings: dict[str, Any], asked: argparse.Namespace) -> int:
    """Run the mutants until time is up; return pytest's exit code."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import pytest

    from tests.support.mutant_runner import Runner

    deadline = time.monotonic() + 60 * asked.minutes
    killers = work.killers()
    runner = Runner(mutants, mutated_files(settings), killers, work.done, asked.jobs, asked.test_seconds, deadline)
    return int(
        pytest.main([*settings["pytest_add_cli_args"], *settings["pytest_add_cli_args_test_selection"]], [runner])
    )


def main(words: Sequence[str]) -> int:
    """Run and report; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="MODULE", help="such as reduction.tree, or checkpoint")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no mutant after so many")
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="mutants at a time (%(default)s)"
    )
    parser.add_argument(
        "--test-seconds", type=float, default=20, help="of the tests of one mutant, the quickest first (%(default)s)"
    )
    asked = parser.parse_args(words)
    os.chdir(ROOT)
    began = time.monotonic()
    settings = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["mutmut"]
    accepted, results = Accepted.read(), mutants_page.read()["results"]
    kept = Kept.read(results) if results.get("mutmut") == version("mutmut") else Kept()
    files = mutated_files(settings)
    there = {(file, name) for file in files for name in functions_of(file)}
    kept.functions = {place: judged for place, judged in kept.functions.items() if place in there}
    prefixes = tuple(f"ddp_core/{name.replace('.', '/')}" for name in asked.only)
    work = Work(kept, accepted, [file for file in files if file.startswith(prefixes or "")])
    mutants = work.mutants()
    print(f"mutants: {len(mutants)} to run, made in {time.monotonic() - began:.0f} s", flush=True)
    code = run(work, mutants, settings, asked) if mutants else 0
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    if mutants:
        from benchmarks.record import machine

        mutants_page.save(kept.plain() | {"commit": commit, "mutmut": version("mutmut")}, machine())
    mutants_page.write()
    print(mutants_page.in_words(kept, accepted))
    print(f"{time.monotonic() - began:.0f} s")
    unknown = accepted.unknown(kept)
    for name in unknown:
        print(f"mutants: {ACCEPTED.relative_to(ROOT)} argues what is not unnoticed: {name}", file=sys.stderr)
    outcomes = [each for judged in kept.functions.values() for each in judged.outcomes]
    if code or unknown or any(each.kind == "error" for each in outcomes):
        return 2
    return int(any(kept.plan(functions_of(file)[name], accepted) != [] for file, name in kept.functions))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

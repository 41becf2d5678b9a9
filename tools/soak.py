"""Repeats the distributed and fault tests while every core is kept busy by something else: `make soak ROUNDS=20`.

A test that waits for a time, where it should wait for an event, passes on a quiet machine and fails on a busy one. Each
round runs the tests once, beside one endless loop per core (`--loops 0` where other work keeps the cores busy). After
each round the counts so far, per round and per test, are written to outputs/soak/<start>/soak.json, and the output of a
failed test beside it. `--slow` adds the slow tests. Then `--cases 500` trains so many random experiments on random
layouts, others each day (tests/foreign/random_fleet.py), and writes what came of them to random/random.json beside.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.record import record, usable_cores

ROOT = Path(__file__).parents[1]
TESTS = ("tests/distributed", "tests/faults", "tests/core/launch")
OTHERS = ("extras", "docker", "cluster", "gpu", "gpu2")
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100_000))"
"""A loop that keeps one core busy, and ends with its parent however that ends."""


def main() -> int:
    """Run the rounds, then the random experiments; return 1 if any test or experiment was bad, else 0."""
    options = parse()
    folder = options.output or ROOT / "outputs" / "soak" / datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    folder.mkdir(parents=True)
    rounds: list[dict[str, Any]] = []
    tests: dict[str, Counter[str]] = {}
    with busy(options.loops):
        for number in range(1, options.rounds + 1):
            rounds.append(run_round(folder, number, options.tests or list(TESTS), options.slow, tests))
            record("soak", sys.orig_argv[1:], summary(rounds, tests, options.loops), folder / "soak.json")
            print(f"round {number}: {rounds[-1]}", flush=True)
    clean = sum(was_clean(each) for each in rounds)
    print(f"{clean} of {len(rounds)} rounds without a failure; {folder / 'soak.json'}")
    is_bad = bool(options.cases) and run_cases(options.cases, folder / "random")
    return int(clean < len(rounds) or is_bad)


def parse() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--loops", type=int, default=usable_cores(), help="endless loops beside (%(default)s)")
    parser.add_argument("--slow", action="store_true", help="run the slow tests, too")
    parser.add_argument("--cases", type=int, default=0, help="random experiments after the rounds (%(default)s)")
    parser.add_argument("--output", type=Path, help="a new folder for the results; by default outputs/soak/<start>")
    parser.add_argument("tests", nargs="*", help=f"files, folders or names of tests; by default {' '.join(TESTS)}")
    return parser.parse_args()


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep `count` cores busy until the block ends."""
    loops = [subprocess.Popen([sys.executable, "-S", "-c", BUSY], start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run_round(
    folder: Path, number: int, tests: list[str], slow: bool, counts: dict[str, Counter[str]]
) -> dict[str, Any]:
    """Run the tests once, add each outcome to `counts`, and return the round's own counts and seconds."""
    report = folder / f"round-{number}.xml"
    markers = " and ".join(f"not {marker}" for marker in (*OTHERS, *(() if slow else ("slow",))))
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", markers, f"--junitxml={report}"]
    started = time.monotonic()
    with (folder / f"round-{number}.txt").open("w") as log:
        code = subprocess.run([*words, *tests], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    seen: Counter[str] = Counter(passed=0, failed=0, skipped=0)
    for name, outcome, text in outcomes(report):
        seen[outcome] += 1
        counts.setdefault(name, Counter())[outcome] += 1
        if outcome == "failed":
            (folder / f"round-{number}-failure-{seen['failed']}.txt").write_text(f"{name}\n\n{text}\n")
    load = round(os.getloadavg()[0], 1)
    return {**seen, "seconds": round(time.monotonic() - started, 1), "exit_code": code, "load_average": load}


def run_cases(count: int, folder: Path) -> bool:
    """Train so many random experiments; return whether one of them was bad. They are kept in `folder`."""
    words = ["-m", "tests.foreign.random_fleet", "--count", str(count), "--output", str(folder)]
    return subprocess.run([sys.executable, *words], cwd=ROOT, check=False).returncode != 0


def outcomes(report: Path) -> Iterator[tuple[str, str, str]]:
    """Each test of a JUnit report: its name, `passed`, `failed` or `skipped`, and the text of a failure."""
    if not report.exists():
        return
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        bad = [*case.findall("failure"), *case.findall("error")]
        outcome = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
        yield name, outcome, "\n\n".join(each.text or "" for each in (*bad, *case.findall("system-err")))


def was_clean(one: dict[str, Any]) -> bool:
    """Whether a round ran tests and none of them failed."""
    return bool(one["exit_code"] == 0 and one["passed"])


def summary(rounds: list[dict[str, Any]], tests: dict[str, Counter[str]], loops: int) -> dict[str, Any]:
    """What is written: the commit, the counts of every round, and those of every test."""
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "commit": said.stdout.strip() or "unknown",
        "busy_loops": loops,
        "clean_rounds": sum(map(was_clean, rounds)),
        "rounds": rounds,
        "tests": {name: dict(counts) for name, counts in sorted(tests.items())},
    }


if __name__ == "__main__":
    sys.exit(main())

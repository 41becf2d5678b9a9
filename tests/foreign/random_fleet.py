"""Trains random experiments on random layouts: `--count 500`, others each day, or `--seeds 0:20`.

Each seed makes one experiment file (`random_experiments`). The driver of other people's code trains it in one process
and on two other layouts, which the seed draws, too: each must end with the bits of one process, or refuse by name.
A seed that is bad has one line, its file is kept, and random.json counts all. The exit code is 1 where a seed is bad.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.record import record
from tests.foreign import driver
from tests.foreign.fleet import Case
from tests.foreign.random_experiments import write

ROOT = Path(__file__).parents[2]
A_DAY = 24 * 60 * 60


def main() -> int:
    """Run the seeds that are asked for; return 1 if one of them is bad, else 0."""
    options = parse()
    folder = options.output or ROOT / "outputs" / "soak" / datetime.now(UTC).strftime("random-%Y%m%dT%H%M%SZ")
    cases = [case_of(seed, folder) for seed in options.seeds]
    ways = {case.key: ways_of(int(case.name)) for case in cases}
    print(f"{len(cases)} random experiments, seeds {options.seeds.start}:{options.seeds.stop}", flush=True)
    rows: list[dict[str, Any]] = []
    driver.load([])
    for case, found in driver.outcomes(cases, options.workers, options.seconds, ways):
        rows.append({"seed": int(case.name), "is": Path(case.file).read_text().splitlines()[2], **found})
        record("random", sys.orig_argv[1:], summary(rows), folder / "random.json")
        if is_bad(found):
            print(in_one_line(case, found), flush=True)
        elif not options.keep:
            Path(case.file).unlink()
    for case in cases[len(rows) :]:
        Path(case.file).unlink()  # not begun in the time
    print_counts(rows, folder / "random.json")
    return int(any(map(is_bad, rows)))


def parse() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.foreign.random_fleet", description=__doc__)
    parser.add_argument("--seeds", type=_seeds, help="from the first to before the second: 0:20")
    parser.add_argument(
        "--count", type=int, default=500, help="without --seeds: so many, others each day (%(default)s)"
    )
    parser.add_argument("--workers", type=int, default=1, help="seeds at a time (%(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no seed after this time")
    parser.add_argument("--output", type=Path, help="the folder of results; by default outputs/soak/random-<start>")
    parser.add_argument("--keep", action="store_true", help="keep the file of every seed")
    options = parser.parse_args()
    first = int(time.time() // A_DAY) * 1000
    options.seeds = options.seeds or range(first, first + options.count)
    return options


def _seeds(text: str) -> range:
    first, _, end = text.partition(":")
    return range(int(first), int(end) if end else int(first) + 1)


def case_of(seed: int, folder: Path) -> Case:
    """The case of this seed, whose file is written into the folder."""
    return Case("random", str(seed), str(write(seed, folder.absolute())), ())


def ways_of(seed: int) -> list[str]:
    """`single` and two other layouts of the driver."""
    others = [way for way in driver.COLUMNS if way != "single"]
    return ["single", *random.Random(f"layouts {seed}").sample(others, 2)]


def is_bad(found: Mapping[str, Any]) -> bool:
    """Whether a layout ended neither with the bits of one process nor with a word."""
    return bool(driver.BAD & set(found["outcomes"].values()))


def in_one_line(case: Case, found: Mapping[str, Any]) -> str:
    """A bad seed: what came of it, its file, and the command that repeats it."""
    outcomes = ", ".join(f"{way} {outcome}" for way, outcome in found["outcomes"].items())
    again = f"python -m tests.foreign.random_fleet --seeds {case.name}:{int(case.name) + 1}"
    return f"seed {case.name}: {outcomes}; {case.file}; again: {again}"


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What is written: counts by layout, refusals by what they say, and all that was found."""
    layouts: dict[str, Counter[str]] = {}
    for row in rows:
        for way, outcome in row["outcomes"].items():
            layouts.setdefault(way, Counter())[outcome] += 1
    return {
        "seeds": len(rows),
        "bad_seeds": sorted(row["seed"] for row in rows if is_bad(row)),
        "layouts": {way: dict(counts) for way, counts in sorted(layouts.items())},
        "refusals": refusals(rows),
        "rows": sorted(rows, key=lambda row: row["seed"]),
    }


def refusals(rows: list[dict[str, Any]]) -> dict[str, list[int]]:
    """The seeds that were refused for each reason, without the names and numbers in it; the most frequent one first."""
    found: dict[str, set[int]] = {}
    for row in rows:
        for way, outcome in row["outcomes"].items():
            if outcome == "refused":
                found.setdefault(_without_names(row["said"][way]), set()).add(row["seed"])
    return {said: sorted(seeds) for said, seeds in sorted(found.items(), key=lambda each: -len(each[1]))}


def _without_names(said: str) -> str:
    said = re.sub(r"\S*random_\d+\.py:\d+: |\(rank \d+ .*?\)|\(replica \d+, .*?\)", "", said)
    return re.sub(r"\b[\w]+\.[\w.]+\b", "NAME", re.sub(r"\d+", "N", said))[:200]


def print_counts(rows: list[dict[str, Any]], file: Path) -> None:
    """The counts at the end."""
    counts = summary(rows)
    for way, outcomes in counts["layouts"].items():
        print(f"{way}: {', '.join(f'{count} {outcome}' for outcome, count in sorted(outcomes.items()))}")
    for said, seeds in counts["refusals"].items():
        print(f"refused {len(seeds)} seeds, such as {seeds[0]}: {said}")
    print(f"{len(counts['bad_seeds'])} of {counts['seeds']} seeds are bad; {file}")


if __name__ == "__main__":
    sys.exit(main())

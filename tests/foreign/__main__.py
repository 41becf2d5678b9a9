"""Trains other people's models, optimizers and schedules on every layout, and writes the table: `make test-foreign`.

What has run with the installed versions is not run again, so a call goes on where the last one ended;
--again runs it all the same. The exit code is 1 where a case that has run now is silent, a fault or hangs, else 0.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.foreign import driver, page, record
from tests.foreign.fleet import GROUPS, LEFT_OUT, Case, fleet
from tests.support.commands import ran


def main() -> int:
    """Run the cases that are asked for; return 1 if one of them is bad, else 0."""
    options = parse()
    if options.page:
        page.write()
        return 0
    installed = [group for group in GROUPS if _is_installed(group)]
    kept, cases = record.rows(options.record), list(fleet(options.only))
    there = [case for case in cases if case.group in installed]
    todo = [case for case in there if options.again or not record.is_there(case, kept)]
    for group in sorted({case.group for case in cases} - set(installed)):
        print(
            f"skipped: {group}, which needs {', '.join(GROUPS[group])}: pip install -c constraints.txt -e '.[foreign]'"
        )
    print(
        f"{len(todo)} of {len(cases)} cases to run, {len(there) - len(todo)} have run with these versions", flush=True
    )
    for key, reason in LEFT_OUT.items():
        if not options.only or any(key.startswith(word) for word in options.only):
            print(f"left out: {key}: {reason}")
    bad = run_all(todo, options)
    if options.record == record.KEPT:
        page.write()
    print(f"{options.record} is written; {bad} cases are bad")
    return int(bad > 0)


def parse() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.foreign", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="cases that begin so: timm torchvision.res"
    )
    parser.add_argument("--workers", type=int, default=1, help="cases at a time (%(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after this time")
    parser.add_argument("--again", action="store_true", help="also what has run with these versions")
    parser.add_argument("--record", type=Path, default=record.KEPT, help="where outcomes are kept (%(default)s)")
    parser.add_argument("--page", action="store_true", help="only write the page from what is kept")
    return parser.parse_args()


def run_all(cases: Sequence[Case], options: argparse.Namespace) -> int:
    """Run the cases, some at a time, a large one alone; keep each outcome; return how many are bad."""
    if not cases:
        return 0
    commit = _commit()
    driver.load(sorted({case.group for case in cases}))
    begun = bad = 0
    for case, found in driver.outcomes(cases, options.workers, options.seconds):
        record.keep(case, found, commit, options.record)
        begun += 1
        bad += bool(driver.BAD & set(found["outcomes"].values()))
        print(f"{case.key}: {_in_words(found)}, {found['seconds']} s ({len(cases) - begun} left)", flush=True)
    if begun < len(cases):
        print(f"not begun in the time: {len(cases) - begun} cases, from {cases[begun].key} on")
    return bad


def _in_words(found: dict[str, Any]) -> str:
    counts = Counter(found["outcomes"].values())
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())


def _is_installed(group: str) -> bool:
    try:
        record.versions(group)
    except metadata.PackageNotFoundError:
        return False
    return True


def _commit() -> str:
    commit = ran("git", "rev-parse", "--short", "HEAD").stdout.strip() or "unknown"
    # The record itself changes with each case that has run.
    changed = ran("git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results").stdout
    return f"{commit}-dirty" if changed else commit


if __name__ == "__main__":
    sys.exit(main())

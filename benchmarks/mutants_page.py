"""Keeps benchmarks/results/mutants.json and writes the tables of docs/reference/mutants.md from it.

`make mutants` calls it; `python -m benchmarks.mutants_page` does only this: it says anew what is stale. With
`--with FILE`, the mutants.json of another branch or clone, the record has what either has.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.mutant_outcomes import Accepted, Kept
from benchmarks.mutations import ROOT, functions_of

KEPT = ROOT / "benchmarks" / "results" / "mutants.json"
PAGE = ROOT / "docs" / "reference" / "mutants.md"
BEGIN, END = "<!-- begin: python -m benchmarks.mutants_page -->", "<!-- end -->"
COLUMNS = ("mutants", "left out", "run", "killed", "timeout", "survived", "not covered", "argued")


def read() -> dict[str, Any]:
    """The record: with the command, the machine, and `Kept.plain` as its results."""
    return dict(json.loads(KEPT.read_text()))


def save(results: dict[str, Any], machine: dict[str, Any] | None = None) -> None:
    """Keep these results beside others of the record; `machine`: a run has come to its end on it."""
    record = read()
    record["results"] |= results
    if machine:
        record |= {"date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), "machine": machine}
    partly = KEPT.with_suffix(".partly")
    partly.write_text(json.dumps(record, indent=1) + "\n")
    partly.replace(KEPT)


def counts(kept: Kept, accepted: Accepted) -> dict[str, Counter[str]]:
    """By file: how many mutants there are, were run, and came to which end; `argued`: unnoticed, with a reason."""
    found: dict[str, Counter[str]] = {}
    for (file, name), judged in kept.functions.items():
        of_file = found.setdefault(file, Counter())
        for outcome in judged.outcomes:
            of_file.update(["mutants", *([outcome.kind] if outcome.kind else [])])
            if outcome.kind not in (None, "left out"):
                of_file["run"] += 1
                of_file["argued"] += bool(outcome.change and accepted.reason(file, name, outcome.change))
    return {file: of_file for file, of_file in found.items() if of_file["mutants"]}


def rows(by_file: dict[str, Counter[str]]) -> Iterator[tuple[str, ...]]:
    """A row for each file, and one for all: the counts, and the score.

    The score: of the mutants that were run and not argued away, the part that a test notices, failing or out of time.
    """
    total: Counter[str] = Counter()
    for file, of_file in [*by_file.items(), ("all", total)]:
        judged = of_file["run"] - of_file["argued"]
        score = f"{(of_file['killed'] + of_file['timeout']) / judged:.1%}" if judged else "-"
        yield (file.removeprefix("ddp_core/"), *(str(of_file[name]) for name in COLUMNS), score)
        total.update(of_file)


def in_words(kept: Kept, accepted: Accepted) -> str:
    """The table for a terminal, and the mutants that nobody has argued away."""
    table = [("file", *COLUMNS, "score"), *rows(counts(kept, accepted))]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    return "\n".join(lines + [f"unnoticed: {line}" for line, reason in unnoticed(kept, accepted) if not reason])


def unnoticed(kept: Kept, accepted: Accepted) -> Iterator[tuple[str, str | None]]:
    """Each mutant that no test noticed: its place and change, and the reason why it may."""
    for (file, name), judged in kept.functions.items():
        for outcome in judged.outcomes:
            if outcome.change:
                line, before, after = outcome.change
                function = functions_of(file).get(name)
                place = f"{file}:{function.line + line}" if function else file
                yield f"{place} ``{before}`` → ``{after or ' '}``", accepted.reason(file, name, outcome.change)


def stale(kept: Kept) -> dict[str, list[str]]:
    """By file: the functions that have changed since their mutants were run, or are gone, or new."""
    found: dict[str, list[str]] = {}
    for file in dict.fromkeys(file for file, _ in kept.functions):
        known = {name: judged.sha for (other, name), judged in kept.functions.items() if other == file}
        now = {name: function.sha for name, function in functions_of(file).items()}
        if changed := sorted(name for name in known | now if known.get(name) != now.get(name)):
            found[file] = changed
    return found


def between_marks(record: dict[str, Any], accepted: Accepted) -> str:
    """What stands between the marks of the page."""
    kept, machine = Kept.read(record["results"]), record["machine"]
    table = [("file", *COLUMNS, "score"), ("---",) * (len(COLUMNS) + 2), *rows(counts(kept, accepted))]
    every = list(unnoticed(kept, accepted))
    left = [line for line, reason in every if not reason]
    lines = [
        f"Of {table[-1][1]} mutants {table[-1][3]} were run, and {table[-1][2]} left out by a rule. "
        f"Last run: {record['date'][:10]}, at commit "
        f"{record['results']['commit'][:12]}, {machine['cores']} cores of {machine['cpu']}, torch {machine['torch']}.",
        *(["", "Stale, because the function has changed since its mutants were run:", ""] if stale(kept) else []),
        *(f"- {file}: {', '.join(names)}" for file, names in stale(kept).items()),
        "",
        *("| " + " | ".join(row) + " |" for row in table),
        "",
        f"Unnoticed, and nobody has argued them away: {len(left)}.",
        "",
        *(f"- {line}" for line in left),
        "",
        f"Unnoticed, with a reason: {len(every) - len(left)}.",
        "",
        *(f"- {reason}: {number}" for reason, number in Counter(reason for _, reason in every if reason).most_common()),
    ]
    return "\n".join(lines).replace("\n\n\n", "\n\n").rstrip() + "\n"


def write() -> None:
    """Write the page's tables anew."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{between_marks(read(), Accepted.read())}\n{END}{after}")


def main(words: Sequence[str]) -> int:
    """Write the page, with the record of another branch if asked to; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants_page", description="Write the page of mutants.")
    parser.add_argument("--with", type=Path, metavar="FILE", help="another mutants.json, whose outcomes to keep, too")
    if other := vars(parser.parse_args(words))["with"]:
        theirs = Kept.read(json.loads(other.read_text())["results"])
        save(Kept.read(read()["results"]).with_other(theirs).plain())
    write()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

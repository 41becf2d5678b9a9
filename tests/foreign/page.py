"""Writes the counts and tables of docs/reference/other-peoples-code.md from benchmarks/results/foreign.json."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tests.foreign.driver import COLUMNS, KILLED
from tests.foreign.fleet import GROUPS, LEFT_OUT, every_case
from tests.foreign.record import ROOT, Row, rows

PAGE = ROOT / "docs" / "reference" / "other-peoples-code.md"
BEGIN, END = "<!-- begin: python -m tests.foreign --page -->", "<!-- end -->"
OUTCOMES = ("identical", "refused", "warned", "SILENT", "FAULT", "HANG", "not tried")
SHARDED = tuple(way for way in COLUMNS if way.startswith("shard"))
_LONGEST = 160


def between_marks(kept: Mapping[str, Row]) -> str:
    """What stands between the marks of the page."""
    return "\n".join(_lines(kept)).rstrip() + "\n"


def write() -> None:
    """Write the page's counts and tables anew."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{between_marks(rows())}\n{END}{after}")


def _lines(kept: Mapping[str, Row]) -> Iterator[str]:
    known = [case.key for case in every_case()]
    missing = [key for key in known if key not in kept]
    yield f"{len(kept)} of {len(known) + len(LEFT_OUT)} cases have run, at {_commits(kept)}, with {_versions(kept)}."
    yield ""
    yield from _table(["layout", *OUTCOMES], ([way, *_counts(kept.values(), [way])] for way in COLUMNS))
    yield ""
    plain = Counter(each for row in kept.values() for way, each in row["outcomes"].items() if way not in SHARDED)
    share = plain["identical"] / plain.total() if plain.total() else 0.0
    yield f"Of the results without shards {share:.1%} are identical."
    if waiting := [key for key, row in kept.items() if any(way not in row["outcomes"] for way in COLUMNS)]:
        yield f"Without some of the layouts yet: {len(waiting)} cases."
    yield ""
    yield from (f"- Left out: {key}: {reason}." for key, reason in LEFT_OUT.items())
    for group in GROUPS:
        waiting = [_name(key) for key in missing if key.startswith(f"{group}.")]
        if waiting:
            yield f"- Not run yet, of {group}: {', '.join(waiting)}."
    for group in GROUPS:
        mine = {key: row for key, row in kept.items() if key.startswith(f"{group}.")}
        if mine:
            yield from ["", f"### {group}", ""]
            yield from _group(group, mine)


def _group(group: str, mine: Mapping[str, Row]) -> Iterator[str]:
    same = [key for key, row in mine.items() if set(row["outcomes"].values()) == {"identical"}]
    others = {key: row for key, row in mine.items() if key not in same}
    names = ", ".join(_name(key) for key in same)
    yield f"Identical on every layout: {len(same)} of {len(mine)}{': ' if names else ''}{names}."
    if others:
        yield ""
        yield from _table(["case", "where", "outcome", "what it says"], _others(others))


def _others(others: Mapping[str, Row]) -> Iterator[list[str]]:
    """A row for each thing that is said of a case."""
    for key, row in others.items():
        together: dict[tuple[str, str], list[str]] = {}
        for way, outcome in row["outcomes"].items():
            if outcome != "identical":
                together.setdefault((outcome, _short(row["said"].get(way, ""))), []).append(way)
        for (outcome, said), ways in together.items():
            yield [_name(key), _where(ways, row), outcome, said]


def _where(ways: Sequence[str], row: Row) -> str:
    if len(ways) == len(row["outcomes"]):
        return "every layout"
    if set(ways) == set(SHARDED):
        return "all three --shard"
    named = [f"{way} on {row['on'].get(way)}" if way == KILLED else way for way in ways]
    return ", ".join(named)


def _counts(every: Iterable[Row], ways: Sequence[str]) -> list[str]:
    counts = Counter(row["outcomes"].get(way) for row in every for way in ways)
    return [str(counts[outcome]) for outcome in OUTCOMES]


def _short(said: str) -> str:
    """The first clause, in one line and without what Markdown would read."""
    line = " ".join(said.split()).removeprefix("error: ")
    clause = re.split(r"; | \(exit", line)[0]
    clause = clause if len(clause) <= _LONGEST else clause[:_LONGEST].rsplit(" ", 1)[0] + " …"
    return clause.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _name(key: str) -> str:
    return key.partition(".")[2]


def _commits(kept: Mapping[str, Row]) -> str:
    return ", ".join(sorted({each[:12] for row in kept.values() for each in row["commit"].split(", ")})) or "no commit"


def _versions(kept: Mapping[str, Row]) -> str:
    found: dict[str, set[str]] = {}
    for row in kept.values():
        for package, version in row["versions"].items():
            found.setdefault(package, set()).add(version.partition("+")[0])
    return ", ".join(f"{package} {' and '.join(sorted(every))}" for package, every in sorted(found.items()))


def _table(head: Sequence[str], body: Iterator[list[str]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for cells in body:
        yield "| " + " | ".join(cells) + " |"

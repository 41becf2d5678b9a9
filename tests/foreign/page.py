"""Writes the counts and names of docs/evidence/other-peoples-code.md from benchmarks/results/foreign.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from tests.foreign.driver import COLUMNS
from tests.foreign.fleet import GROUPS, LEFT_OUT, every_case
from tests.foreign.record import ROOT, Row, rows

PAGE = ROOT / "docs" / "evidence" / "other-peoples-code.md"
BEGIN, END = "<!-- begin: python -m tests.foreign --page -->", "<!-- end -->"
OUTCOMES = ("identical", "refused", "warned", "SILENT", "FAULT", "HANG", "not tried")
SHARDED = tuple(way for way in COLUMNS if way.startswith("shard"))
KINDS = ("identical on every layout", "refused with `--shard` alone", "refused without it, too", "otherwise")


def between_marks(kept: Mapping[str, Row]) -> str:
    """What stands between the marks of the page."""
    return "\n".join(_lines(kept)) + "\n"


def write() -> None:
    """Write the page's counts and names anew."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{between_marks(rows())}\n{END}{after}")


def _lines(kept: Mapping[str, Row]) -> Iterator[str]:
    known = [case.key for case in every_case()]
    yield f"{len(kept)} of {len(known) + len(LEFT_OUT)} cases have run, with {_versions(kept)}:"
    yield from ("", f"| library | cases | {' | '.join(KINDS)} |", "|---|---|" + "---|" * len(KINDS))
    kinds = {key: _kind(row) for key, row in kept.items()}
    for group in GROUPS:
        mine = Counter(kind for key, kind in kinds.items() if key.startswith(f"{group}."))
        yield f"| {group} | {mine.total()} | {' | '.join(str(mine[kind]) for kind in KINDS)} |"
    plain = Counter(each for row in kept.values() for way, each in row["outcomes"].items() if way not in SHARDED)
    yield from ("", f"Without shards {plain['identical'] / max(1, plain.total()):.1%} of the results are identical.")
    if waiting := [key for key, row in kept.items() if any(way not in row["outcomes"] for way in COLUMNS)]:
        yield f"Not tried on some of the layouts yet: {len(waiting)} cases."
    dirty = sum("dirty" in row["commit"] for row in kept.values())
    yield f"{dirty or 'None'} of the cases ran on a commit with changes."
    yield ""
    named = {kind: [key for key in kinds if kinds[key] == kind] for kind in KINDS[1:]}
    named |= {"not run yet": [key for key in known if key not in kept], "left out": [*LEFT_OUT]}
    for kind, keys in named.items():
        for group in GROUPS:
            if names := [key.partition(".")[2] for key in keys if key.startswith(f"{group}.")]:
                yield f"- {group}, {kind}: {', '.join(names)}."


def _kind(row: Row) -> str:
    others = {way: outcome for way, outcome in row["outcomes"].items() if outcome != "identical"}
    if not others:
        return KINDS[0]
    if set(others.values()) != {"refused"}:
        return KINDS[3]
    return KINDS[1] if set(others) <= set(SHARDED) else KINDS[2]


def _versions(kept: Mapping[str, Row]) -> str:
    found: dict[str, set[str]] = {}
    for row in kept.values():
        for package, version in row["versions"].items():
            found.setdefault(package, set()).add(version.partition("+")[0])
    return ", ".join(f"{package} {' and '.join(sorted(every))}" for package, every in sorted(found.items()))

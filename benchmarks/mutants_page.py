"""Writes the tables of docs/reference/mutants.md from benchmarks/results/mutants.json.

`make mutants` calls it; `python -m benchmarks.mutants_page` does only this.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "benchmarks" / "results" / "mutants.json"
PAGE = ROOT / "docs" / "reference" / "mutants.md"
BEGIN, END = "<!-- begin: python -m benchmarks.mutants_page -->", "<!-- end -->"
COLUMNS = ("mutants", "run", "killed", "timeout", "survived", "accepted", "not covered")


def rows(results: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row for each module, and one for all: the counts, and the score.

    The score: of the mutants that were run and not accepted, the part that a test notices, by a failure or a timeout.
    """
    total: Counter[str] = Counter()
    for module, counts in [*results["modules"].items(), ("all", total)]:
        judged = counts["run"] - counts["accepted"]
        score = f"{(counts['killed'] + counts['timeout']) / judged:.1%}" if judged else "-"
        yield (module, *(str(counts[name]) for name in COLUMNS), score)
        total.update({name: count for name, count in counts.items() if isinstance(count, int)})


def in_words(results: dict[str, Any]) -> str:
    """The table and the survivors for a terminal."""
    table = [("module", *COLUMNS, "score"), *rows(results)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    for survivor in results["survivors"]:
        reason = f" (accepted: {survivor['accepted']})" if survivor["accepted"] else ""
        lines.append(f"survived: {survivor['at']}: {survivor['before']} -> {survivor['after']}{reason}")
    return "\n".join(lines)


def digest_of(module: str) -> str | None:
    """SHA-256 of the file of a module as it is now; None where it is gone."""
    file = ROOT / module
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else None


def stale(results: dict[str, Any]) -> list[str]:
    """The modules that are no longer as they were when their mutants were run, or of which that is not on record."""
    return [module for module, counts in results["modules"].items() if counts.get("sha256") != digest_of(module)]


def between_marks(kept: dict[str, Any]) -> str:
    """What stands between the marks of the page."""
    results, machine = kept["results"], kept["machine"]
    *_, (_, mutants, run, *_) = rows(results)
    changed = [module.removeprefix("ddp_core/") for module in stale(results)]
    if len(changed) == len(results["modules"]):
        changed = ["all of them"]
    lines = [
        f"Of {mutants} mutants {run} were run. `{kept['command']}`, {kept['date'][:10]}, at commit "
        f"{results['commit'][:12]}, on {machine['cores']} cores of {machine['cpu']}, torch {machine['torch']}.",
        *(["", f"Stale, because the file has changed since: {', '.join(changed)}."] if changed else []),
        "",
        "| " + " | ".join(("module", *COLUMNS, "score")) + " |",
        "|" + "---|" * (len(COLUMNS) + 2),
        *("| " + " | ".join(row) + " |" for row in rows(results)),
    ]
    argued = [survivor for survivor in results["survivors"] if survivor["accepted"]]
    left = [survivor for survivor in results["survivors"] if not survivor["accepted"]]
    for title, survivors in (("Accepted survivors", argued), ("Survivors that nobody has argued away yet", left)):
        lines += ["", f"{title}: {len(survivors)}.", ""]
        for survivor in survivors:
            reason = f": {survivor['accepted']}" if survivor["accepted"] else ""
            lines.append(f"- {survivor['at']} ``{survivor['before']}`` → ``{survivor['after'] or ' '}``{reason}")
    return "\n".join(lines).rstrip() + "\n"


def write() -> None:
    """Write the page's tables anew."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{between_marks(json.loads(KEPT.read_text()))}\n{END}{after}")


if __name__ == "__main__":
    write()
    sys.exit(0)

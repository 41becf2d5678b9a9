"""Put what benchmarks have recorded into the pages that state it: tables, rows and figures in sentences.

    python -m benchmarks.pages

A table is found by how its first line begins, a row of benchmarks/README.md by its command, a figure in a sentence by
the words around it. A test holds pages and results together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import tables
from benchmarks.last_figures import last_figures

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks" / "README.md"
ROW = re.compile(r"^(\| `python -m benchmarks\.(\w+)` \| [^|]+ \| ).+( \|)$", re.MULTILINE)


@dataclass(frozen=True)
class Contents:
    """What is made anew in a page: tables by how they begin, and figures by the sentence around them."""

    tables: Mapping[str, Callable[[], str]] = field(default_factory=dict)
    sentences: Mapping[str, Callable[[], str]] = field(default_factory=dict)
    """Patterns with one group, the figure; a space stands for any, since lines are wrapped."""


PAGES: dict[Path, Contents] = {
    BENCHMARKS: Contents(
        {
            "| step, of the bare loop's |": tables.steps_in_parts,
            "| case |": tables.whole_runs,
            "| | asynchronous save |": tables.saving,
            "| seconds |": tables.commands,
        }
    ),
    ROOT / "docs" / "reference" / "cost-of-exactness.md": Contents(
        {
            "| ranks | pieces |": tables.one_sum,
            f"| nodes {tables.TIMES} ranks |": tables.across_nodes,
            f"| parts: nodes {tables.TIMES} ranks |": tables.parts_across_nodes,
            "| micro-batches per rank | 1 |": tables.copies_of_gradients,
            "| micro-batches per rank | contiguous": tables.strided_shares,
        }
    ),
    ROOT / "docs" / "how-to" / "shard-the-optimizer.md": Contents(
        {"| `--shard` | a step, of one with |": tables.steps_of_shards, "| a rank of |": tables.memory_of_shards}
    ),
    ROOT / "docs" / "explanation" / "recovery.md": Contents({"| | median |": tables.recoveries}),
    ROOT / "docs" / "explanation" / "portable-numerics.md": Contents({"| in one thread |": tables.portable_speeds}),
    ROOT / "README.md": Contents({"| | time |": tables.costs}),
}


def made_anew(page: Path) -> str:
    """The text of the page with what is recorded now. Raises ValueError where a table or sentence is not there once."""
    text, contents = page.read_text(), PAGES[page]
    for begins, table in contents.tables.items():
        text = _replaced(re.compile(rf"^{re.escape(begins)}.*\n(?:\|.*\n?)*", re.MULTILINE), text, table() + "\n", page)
    for words, figure in contents.sentences.items():
        pattern = re.compile(words.replace(" ", r"\s+"))
        found = pattern.search(text)
        if found is None:
            raise ValueError(f"{page}: no sentence with {words!r}")
        text = text[: found.start(1)] + figure() + text[found.end(1) :]
    if page == BENCHMARKS:
        text = ROW.sub(lambda row: f"{row[1]}{last_figures(row[2])}{row[3]}", text)
    return text


def _replaced(pattern: re.Pattern[str], text: str, by: str, page: Path) -> str:
    text, times = pattern.subn(lambda _: by, text)
    if times != 1:
        raise ValueError(f"{page}: {times} places that look like {pattern.pattern!r}, not one")
    return text


def main() -> None:
    """Write the pages anew; say which have changed."""
    for page in PAGES:
        before, after = page.read_text(), made_anew(page)
        page.write_text(after)
        print(f"{page.relative_to(ROOT)}: {'as it was' if after == before else 'written'}")


if __name__ == "__main__":
    main()

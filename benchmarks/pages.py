"""Put what benchmarks have recorded into the tables of the pages that state it.

    python -m benchmarks.pages

A table is found by how its first line begins. A test holds pages and results together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks import tables

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks" / "README.md"
PAGES: dict[Path, Mapping[str, Callable[[], str]]] = {
    BENCHMARKS: {
        "| step, of the bare loop's |": tables.steps_in_parts,
        "| case |": tables.whole_runs,
        "| | asynchronous save |": tables.saving,
        "| seconds |": tables.commands,
    },
    ROOT / "docs" / "evidence" / "costs.md": {
        "| ranks | buckets |": tables.one_sum,
        f"| nodes {tables.TIMES} ranks |": tables.across_nodes,
        "| micro-batches per rank | 1 |": tables.copies_of_gradients,
        "| micro-batches per rank | contiguous": tables.strided_shares,
    },
    ROOT / "docs" / "explanation" / "checkpoints.md": {"| samples | DistributedSampler": tables.samplers},
    ROOT / "docs" / "how-to" / "shard-the-optimizer.md": {
        "| `--shard` | its step ÷ one with |": tables.steps_of_shards,
        "| ranks | `none`": tables.memory_of_shards,
    },
    ROOT / "docs" / "explanation" / "recovery.md": {"| with `restart`, or `live` | median |": tables.recoveries},
    ROOT / "docs" / "explanation" / "portable-numerics.md": {"| in one thread |": tables.portable_speeds},
    ROOT / "README.md": {"| | ratio |": tables.costs},
}


def made_anew(page: Path) -> str:
    """The text of the page with what is recorded now. Raises ValueError where a table is not there once."""
    text = page.read_text()
    for begins, table in PAGES[page].items():
        found = re.findall(rf"^{re.escape(begins)}.*\n(?:\|.*\n?)*", text, re.MULTILINE)
        if len(found) != 1:
            raise ValueError(f"{page}: {len(found)} tables that begin with {begins!r}, not one")
        text = text.replace(found[0], table() + "\n")
    return text


def main() -> None:
    """Write the pages anew; say which have changed."""
    for page in PAGES:
        before, after = page.read_text(), made_anew(page)
        page.write_text(after)
        print(f"{page.relative_to(ROOT)}: {'as it was' if after == before else 'written'}")


if __name__ == "__main__":
    main()

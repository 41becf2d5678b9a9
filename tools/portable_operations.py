"""Lists what is known of torch's operations under portable numerics: `python -m tools.portable_operations`.

Runs the operations and the short trainings of the published tables under a profiler, on one thread, and writes their
names to `ddp_core/numerics/proved.txt` and their numbers to the page. What these tables hold has the same bits on each
CPU that has confirmed them. The page tells of other people's models, too; `--page` writes it alone.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ddp_core.base.determinism import choose_kernels
from ddp_core.experiment.file import INSTALLED
from ddp_core.numerics.kernels import portable_kernels
from ddp_core.numerics.known import BY_DEFINITION, NAME, NOT_OURS, PROVED, status_of
from ddp_core.numerics.limits import LIMITS, limits_hold
from ddp_lab.probe.child import trained
from ddp_lab.probe.operations import all_operations
from ddp_lab.probe.published import published

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "portable-numerics.md"
BEGIN, END = "<!-- begin: python -m tools.portable_operations -->", "<!-- end -->"
FOREIGN = ROOT / "benchmarks" / "results" / "foreign-operations.json"
"""What each of other people's models calls; its fields are `operations`, or `trouble`."""

_WHY_PROVED = (
    "the published digests are made of them, and other CPUs, emulated ones among them, have confirmed these. Another "
    "shape or dtype may take other code"
)


def main() -> int:
    """Write the list and the page; starts itself anew where torch was loaded without the limits."""
    if "--page" in sys.argv[1:]:
        write_page()
        return 0
    if not limits_hold():
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **LIMITS, "KINETO_LOG_LEVEL": "99"})
    choose_kernels()
    torch.set_num_threads(1)
    names: set[str] = set()
    with portable_kernels():
        with _traced(names):
            operations = all_operations()
        for operation in operations.values():
            with _traced(names):
                operation()
        for name, steps in published().training_steps.items():
            with _traced(names):
                trained(INSTALLED / f"{name}.py", steps.settings)
    PROVED.write_text("".join(f"{name}\n" for name in sorted(names)), encoding="utf-8")
    write_page()
    return 0


@contextmanager
def _traced(names: set[str]) -> Iterator[None]:
    """Adds the operations that are called in the block to `names`."""
    with torch.autograd.profiler.profile() as profiler:
        yield
    found = {event.name() for event in profiler.kineto_results.events()}
    names |= {name for name in found if NAME.fullmatch(name) and not name.startswith(NOT_OURS)}


def write_page() -> None:
    """Write what the page says of operations anew."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{between_marks()}\n\n{END}{after}", encoding="utf-8")


def between_marks() -> str:
    """What is known, from the lists in `ddp_core/numerics`."""
    proved = PROVED.read_text(encoding="utf-8").split()
    moved = [name for name in BY_DEFINITION - set(proved) if not name.endswith("_")]
    exact = "they move or compare numbers, or are exact"
    rows = [
        ("[proved](../../ddp_core/numerics/proved.txt)", len(proved), _WHY_PROVED),
        ("[by definition](../../ddp_core/numerics/known.py)", f"{len(moved)} more", exact),
        ("unknown", "every other", "nobody has compared them, or they are known to differ: a warning"),
    ]
    table = "\n".join(f"| {what} | {count} | {why} |" for what, count, why in rows)
    return f"""| what is known | operations | why |
|---|---|---|
{table}

{_of_others()}"""


def _of_others() -> str:
    """What is known of the operations that other people's models call."""
    kept: dict[str, dict[str, Any]] = json.loads(FOREIGN.read_text(encoding="utf-8"))
    traced = {model: set(found["operations"]) for model, found in kept.items() if "operations" in found}
    called = Counter(status_of(name) for name in set().union(*traced.values()))
    known = sum(all(status_of(name) != "unknown" for name in names) for names in traced.values())
    counts = ", ".join(f"{called[status]} {status}" for status in ("proved", "by definition", "unknown"))
    return textwrap.fill(
        f"One step of {len(traced)} of {len(kept)} models of [other people's code](../evidence/other-peoples-code.md) "
        f"was traced. They call {called.total()} operations: {counts}. {known} of the models call no unknown one "
        "([record](../../benchmarks/results/foreign-operations.json)).",
        125,
        break_long_words=False,
        break_on_hyphens=False,
    )


if __name__ == "__main__":
    sys.exit(main())

"""Lists what is known of torch's operations under portable numerics: `python -m tools.portable_operations`.

Runs the operations and the short trainings of the published tables under a profiler, on one thread, and writes their
names to `ddp_core/numerics/proved.txt` and the page. What these tables hold has the same bits on every CPU that has
confirmed them. The page tells of other people's models, too (`tests.foreign.operations`); `--page` writes it alone.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ddp_core.base.determinism import choose_kernels
from ddp_core.experiment.file import INSTALLED
from ddp_core.numerics.kernels import REFUSED, portable_kernels
from ddp_core.numerics.known import BY_DEFINITION, NAME, NOT_OURS, PROVED, status_of
from ddp_core.numerics.limits import LIMITS, limits_hold
from ddp_lab.probe.child import trained
from ddp_lab.probe.operations import all_operations
from ddp_lab.probe.published import published

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "portable-operations.md"
FOREIGN = ROOT / "benchmarks" / "results" / "foreign-operations.json"
"""What each of other people's models calls; its fields are `operations`, or `trouble`."""

_SHOWN = 4
_WHY_PROVED = (
    "the [published digests](portable-numerics.md) are made of them, and other CPUs, emulated ones among them, have "
    "confirmed these. Another shape or dtype may take other code"
)


def main() -> int:
    """Write the list and the page; starts itself anew where torch was loaded without the limits."""
    if "--page" in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
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
    PROVED.write_text("".join(f"{name}\n" for name in sorted(names - REFUSED.keys())), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    return 0


@contextmanager
def _traced(names: set[str]) -> Iterator[None]:
    """Adds the operations that are called in the block to `names`."""
    with torch.autograd.profiler.profile() as profiler:
        yield
    found = {event.name() for event in profiler.kineto_results.events()}
    names |= {name for name in found if NAME.fullmatch(name) and not name.startswith(NOT_OURS)}


def page() -> str:
    """The page, from the lists in `ddp_core/numerics`."""
    proved = PROVED.read_text(encoding="utf-8").split()
    moved = sorted(name for name in BY_DEFINITION - set(proved) if not name.endswith("_"))
    rows = [
        ("proved", f"{len(proved)}, [below](#proved)", _WHY_PROVED),
        ("by definition", f"{len(moved)} more, [below](#by-definition)", "they move or compare numbers, or are exact"),
        (
            "refused",
            f"{len(REFUSED)}, [below](#refused)",
            "other CPUs give other bits; a call ends the run, with a message",
        ),
        ("unknown", "every other", "nobody has compared them: a warning"),
    ]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"""# Operations under portable numerics

What is known of each of torch's operations, by its name in torch's dispatcher. After the first step of a run with
portable numerics rank 0 looks at the names of all operations that the step has called, and warns of those that are
unknown. Written by `python -m tools.portable_operations`; `ddp_core/numerics/known.py` has the same lists.

| what is known | operations | why |
|---|---|---|
{table}

Collectives are not listed: the order of their sums is [the reduction's](../explanation/exact-reduction.md).

## Proved

{_listed(proved)}

## By definition

Also in their forms in place (`aten::relu_`).

{_listed(moved)}

## Refused

{_listed(sorted(REFUSED))}

Dynamic layers are refused with 8 bits alone; with `reduce_range` they have 7, and are computed.

## Other people's models

{_of_others()}
"""


def _of_others() -> str:
    """What is known of the operations that other people's models call, and which of these models call unknown ones."""
    kept: dict[str, dict[str, Any]] = json.loads(FOREIGN.read_text(encoding="utf-8"))
    users: dict[str, list[str]] = {}
    for model, found in kept.items():
        for name in found.get("operations", ()):
            users.setdefault(name, []).append(model)
    by_status: dict[str, list[str]] = {"proved": [], "by definition": [], "refused": [], "unknown": []}
    for name in sorted(users):
        by_status[status_of(name)].append(name)
    unknown = by_status["unknown"]
    traced = [model for model, found in kept.items() if "operations" in found]
    known = sum(not set(kept[model]["operations"]) & set(unknown) for model in traced)
    rows = [f"| `{name}` | {len(users[name])} | {_some(users[name])} |" for name in unknown]
    head = ["| unknown operation | models | among them |", "|---|---|---|"]
    table = "\n".join([*head, *rows, "", ""]) if rows else ""
    others = "\n".join(f"- {model}: {found['trouble']}" for model, found in kept.items() if "trouble" in found)
    counts = ", ".join(f"{len(names)} {status}" for status, names in by_status.items())
    return f"""What one step of each model of [other people's code](other-peoples-code.md) calls, traced by
`python -m tests.foreign.operations` under portable numerics. {len(traced)} of {len(kept)} models were traced. They
call {len(users)} operations: {counts}. {known} of the models call no unknown one.

{table}{"Not traced:" if others else "Every model has been traced."}

{others}

What they call is in [foreign-operations.json](../../benchmarks/results/foreign-operations.json).""".rstrip()


def _some(models: list[str]) -> str:
    shown = ", ".join(models[:_SHOWN])
    return shown + (f" and {len(models) - _SHOWN} more" if len(models) > _SHOWN else "")


def _listed(names: Iterable[str]) -> str:
    return textwrap.fill(", ".join(f"`{name}`" for name in names), 120, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    sys.exit(main())

"""`ddp probe`: does this machine compute the published bits?

A process of its own, with the limits of portable numerics set before it loads torch, computes the digest of each
operation and of a short training of each experiment. They are compared with the published table.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_core.base.ending import said_by
from ddp_core.base.errors import DIFFERENT, ExitCode, UserError
from ddp_core.numerics.limits import LIMITS, portable_refused_by
from ddp_lab.options import Parser
from ddp_lab.probe.published import Published, published
from ddp_lab.probe.sharing import outcome, record_of

Found = dict[tuple[str, str], dict[str, str]]
"""By kind (`operations` or `training_steps`) and name, either `digest` or `trouble`."""

_LIMIT = 600.0
"""Seconds after which a process is taken to hang; it takes five where nothing else runs."""


@dataclass(frozen=True)
class Difference:
    """An operation, or a short training, that has not the published digest here."""

    kind: str
    name: str
    published: str
    here: str | None
    """None where nothing was computed; `trouble` says why."""
    trouble: str | None = None

    def describe(self) -> str:
        """The difference in one line."""
        what = "operation" if self.kind == "operations" else "training steps of"
        here = self.trouble if self.here is None else f"here {self.here[:12]}"
        return f"{what} {self.name}: published {self.published[:12]}, {here}"


@dataclass(frozen=True)
class Verdict:
    """What the probe has found, beside the table that it compared with."""

    table: Published
    versions: Mapping[str, str]
    differences: Sequence[Difference]

    @property
    def count(self) -> int:
        """How many digests were compared."""
        return len(self.table.operations) + len(self.table.training_steps)

    @property
    def line(self) -> str:
        """The verdict in one line."""
        if not self.differences:
            return f"this machine reproduces all {self.count} published digests"
        names = [each.name for each in self.differences]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        differ = "differs" if len(names) == 1 else "differ"
        return f"this machine reproduces {self.count - len(names)} of {self.count}; {shown} {differ}"

    @property
    def other_torch(self) -> str | None:
        """A line that says that the table is of another version of torch; None where it is of this one."""
        here = self.table.other_torch(self.versions.get("torch", ""))
        if here is None:
            return None
        return f"the published digests are of torch {self.table.torch}; this is {here}, which may be why some differ"


@said_by("ddp")
def main(arguments: Sequence[str] | None = None) -> int:
    """Print whether this machine has the published bits; returns 0 where it has all of them, 1 where some differ.

    Prints one line, and returns 2, where portable numerics cannot be had here.
    """
    parser = Parser(prog="ddp probe", description="Say whether this CPU computes the published bits; takes seconds.")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    kinds.add_argument("--share", action="store_true", help="print a record of this machine to send back")
    options = parser.parse_args(arguments)
    if (reason := portable_refused_by()) is not None:
        raise UserError(f"portable numerics: {reason}; use --numerics native")
    table = published()
    versions, found = measured(table)
    verdict = judge(table, versions, found)
    if options.share:
        told = outcome(table, [each.describe() for each in verdict.differences], found)
        print(json.dumps(record_of(versions, [told]), indent=1))
    elif options.json:
        print(json.dumps(_as_json(verdict), indent=1))
    else:
        if verdict.other_torch:
            print(verdict.other_torch)
        print(verdict.line)
        for each in verdict.differences:
            print(f"  {each.describe()}")
    return DIFFERENT if verdict.differences else ExitCode.DONE


def _as_json(verdict: Verdict) -> dict[str, Any]:
    table = verdict.table
    return {
        "reproduced": verdict.count - len(verdict.differences),
        "published": verdict.count,
        "verdict": verdict.line,
        "different": [vars(each) for each in verdict.differences],
        "versions": dict(verdict.versions),
        "table": {"rules": table.rules, "torch": table.torch, "numpy": table.numpy, "made_on": dict(table.made_on)},
    }


def judge(table: Published, versions: Mapping[str, str], found: Found) -> Verdict:
    """Compare what was found with the table."""
    wanted = {("operations", name): digest for name, digest in table.operations.items()}
    wanted |= {("training_steps", name): steps.weights_sha256 for name, steps in table.training_steps.items()}
    differences = [
        Difference(kind, name, digest, here.get("digest"), here.get("trouble"))
        for (kind, name), digest in wanted.items()
        if (here := found.get((kind, name), {"trouble": "not computed"})).get("digest") != digest
    ]
    return Verdict(table, versions, differences)


def measured(
    table: Published, interpreter: Sequence[str] = (sys.executable,), limit: float = _LIMIT
) -> tuple[dict[str, str], Found]:
    """The versions, and the digests of all that is in the table, computed by `interpreter` in processes of their own.

    An operation that ends its process counts as one that differs, and another process computes those after it. Raises
    UserError where a process ends before it computes anything.
    """
    asked: list[dict[str, Any]] = [{"kind": "operations", "name": name} for name in table.operations]
    asked += [
        {"kind": "training_steps", "name": name, "settings": list(steps.settings)}
        for name, steps in table.training_steps.items()
    ]
    versions: dict[str, str] = {}
    found: Found = {}
    while left := [each for each in asked if (each["kind"], each["name"]) not in found]:
        lines, ending = _computed(left, interpreter, limit)
        if not lines:
            raise UserError(f"the probe could not compute anything: its process {ending}")
        versions, *answers = lines
        found |= {(line.pop("kind"), line.pop("name")): line for line in answers}
        if len(answers) < len(left):
            ended_by = left[len(answers)]
            found[ended_by["kind"], ended_by["name"]] = {"trouble": f"its process {ending}"}
    return versions, found


def _computed(
    asked: Sequence[Mapping[str, Any]], interpreter: Sequence[str], limit: float
) -> tuple[list[dict[str, str]], str]:
    """The lines that a process has written until it ended, and how it ended."""
    try:
        done = subprocess.run(
            [*interpreter, "-m", "ddp_lab.probe.child"],
            input=json.dumps(asked).encode(),
            capture_output=True,
            env=os.environ | dict(LIMITS) | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            timeout=limit,
            check=False,
        )
        output, ending = done.stdout, f"ended with {done.returncode}"
        if done.returncode < 0:
            ending = f"was ended by {signal.Signals(-done.returncode).name}"
        elif complaint := done.stderr.decode(errors="replace").strip():
            ending += f": {complaint.splitlines()[-1]}"
    except subprocess.TimeoutExpired as error:
        output, ending = error.stdout or b"", f"did not end within {limit:.0f} s"
    # A line that was being written when the process ended is no line.
    return [json.loads(line) for line in output.splitlines(keepends=True) if line.endswith(b"\n")], ending

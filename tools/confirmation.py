"""Which published digests an emulated CPU reproduces: `make portable-digests CONFIRM=1` asks for each CPU.

    python -m tools.confirmation CPU PART PARTS

runs the probe on an emulated CPU for one part of the table, every PARTS-th name from the PART-th on, and prints a JSON
object: how many digests were `reproduced`, and the `different` ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice, product
from typing import Any, TypeVar

from ddp_core.base.ending import said_by
from ddp_core.base.errors import ExitCode, UserError
from ddp_lab.probe.command import judge, measured
from ddp_lab.probe.published import Published, published
from tools.emulation import CPUS, FAULTS, emulator, python_on, version, without_faults
from tools.same_code import code_here, is_same
from tools.side_by_side import ended

PARTS = 2
"""Each CPU's share is cut so that two cores end it together."""
_PATIENCE = 4 * 3600.0
"""Seconds that one part may take, which are a quarter of an hour where nothing else runs."""

_Value = TypeVar("_Value")
Confirmation = Mapping[str, Any]


@said_by("confirmation")
def main() -> int:
    """Probe one part, and print what came out."""
    cpu, part, parts = sys.argv[1:]
    table = part_of(without_faults(published()), int(part), int(parts))
    verdict = judge(table, *measured(table, python_on(cpu), limit=_PATIENCE))
    different = {each.name: each.describe() for each in verdict.differences}
    print(json.dumps({"reproduced": verdict.count - len(different), "different": different}))
    return ExitCode.DONE


def part_of(table: Published, part: int, parts: int) -> Published:
    """The table with every `parts`-th of its names, from `part` on."""

    def cut(names: Mapping[str, _Value]) -> dict[str, _Value]:
        return dict(islice(names.items(), part, None, parts))

    return replace(table, operations=cut(table.operations), training_steps=cut(table.training_steps))


def confirm(table: Published, keep: Callable[[Published], None]) -> None:
    """Hand the table with what the emulated CPUs reproduce to `keep`, after each CPU; two processes compute at a time.

    CPUs that have confirmed this table with the same code and the same emulator are not asked again. Raises UserError
    where the emulator is missing, or a probe fails.
    """
    if emulator() is None:
        raise UserError("--confirm needs qemu-x86_64 (Debian: apt install qemu-user)")
    code, by = code_here(), f"qemu-x86_64 {version()}"
    known = {
        each["cpu"]: each
        for each in table.confirmed_by
        if each["emulator"] == by and each["not_tried"] == FAULTS and is_same(each.get("code"), code)
    }
    if known:
        print(f"portable-digests: {', '.join(known)}: confirmed already with this code", flush=True)
    asked = [pair for pair in product(CPUS, range(PARTS)) if pair[0] not in known]
    commands = {(cpu, part): _command(cpu, part) for cpu, part in asked}
    found: dict[str, list[Confirmation]] = {}
    with ended(commands, PARTS, _PATIENCE) as results:
        for (cpu, _), how in results:
            if how.code != 0:
                raise UserError(f"{cpu}: the probe ended with {how.code}: {how.last_line}")
            parts = found.setdefault(cpu, [])
            parts.append(json.loads(how.output))
            if len(parts) < PARTS:
                continue
            known[cpu] = {
                "cpu": cpu,
                "emulator": by,
                "date": datetime.now(UTC).date().isoformat(),
                "code": code,
                **_together(parts),
                "not_tried": FAULTS,
            }
            _say(known[cpu])
            keep(replace(table, confirmed_by=tuple(known[each] for each in CPUS if each in known)))


def _command(cpu: str, part: int) -> list[str]:
    return [sys.executable, "-m", "tools.confirmation", *map(str, (cpu, part, PARTS))]


def _together(parts: Sequence[Confirmation]) -> Confirmation:
    return {
        "reproduced": sum(each["reproduced"] for each in parts),
        "different": {name: line for each in parts for name, line in each["different"].items()},
    }


def _say(confirmation: Confirmation) -> None:
    different = confirmation["different"]
    count = confirmation["reproduced"] + len(different)
    print(f"portable-digests: {confirmation['cpu']} reproduces {confirmation['reproduced']} of {count}", flush=True)
    for line in different.values():
        print(f"  {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""The CPUs of docs/evidence/machines.md, which have run the probe: `python -m tools.machines_seen`.

    ddp probe --share > record.json
    python -m tools.machines_seen record.json

Adds records that `ddp probe --share` has printed to benchmarks/results/machines-seen.json, and writes the tables anew:
that of these records, and that of the trainings which `tools.portable_runs` keeps.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ddp_core.base.documents import read_document
from ddp_core.base.ending import said_by
from ddp_core.base.errors import ExitCode, UserError
from ddp_lab.probe.sharing import FORMAT
from ddp_lab.records import record_text
from tools import portable_runs

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "benchmarks" / "results" / "machines-seen.json"
PAGE = ROOT / "docs" / "evidence" / "machines.md"
BEGIN, END = "<!-- begin: python -m tools.machines_seen -->", "<!-- end -->"
BEGIN_RUNS = "<!-- begin: python -m tools.portable_runs -->"

Record = dict[str, Any]


@said_by("tools.machines_seen")
def main() -> int:
    """Add the records that the words name, and write the page."""
    records: list[Record] = json.loads(KEPT.read_text(encoding="utf-8"))
    for name in sys.argv[1:]:
        new = read_document(Path(name), dict[str, Any])
        if new.get("format") != FORMAT or not isinstance(new.get("machine"), dict) or not new.get("outcomes"):
            raise UserError(f"{name} is no record of `ddp probe --share` of format {FORMAT}")
        if new not in records:
            records.append(new)
    KEPT.write_text(record_text(records) + "\n", encoding="utf-8")
    write_page()
    return ExitCode.DONE


def write_page() -> None:
    """Write both tables anew from what is kept."""
    page = PAGE.read_text(encoding="utf-8")
    for begin, made in (
        (BEGIN, table(json.loads(KEPT.read_text(encoding="utf-8")))),
        (BEGIN_RUNS, portable_runs.table(json.loads(portable_runs.KEPT.read_text(encoding="utf-8")))),
    ):
        before, found, rest = page.partition(begin)
        if found:
            page = f"{before}{begin}\n\n{made}\n\n{END}{rest.partition(END)[2]}"
    PAGE.write_text(page, encoding="utf-8")


def table(records: list[Record]) -> str:
    """A row for each machine and version of the rules: its newest record."""
    newest: dict[tuple[str, str, str], str] = {}
    for record in records:
        machine, commit = record["machine"], (record["code"].get("commit") or record["code"].get("version") or "?")[:8]
        for each in record["outcomes"]:
            differ = f"; {'; '.join(each['different'][:3])}" if each["different"] else ""
            digests = f"{each['reproduced']} of {each['published']}{differ}"
            place = (machine["cpu"], _seen(machine), f"{record['versions']['torch']}, rules {each['rules']}")
            newest[place] = f"{record['date']}, {commit} | {digests}"
    head = "| CPU | seen by a program as | torch | date, commit | digests that agree |\n|---|---|---|---|---|\n"
    return head + "\n".join(f"| {' | '.join(place)} | {said} |" for place, said in newest.items())


def _seen(machine: Record) -> str:
    seen = [f"family {machine['family']}, model {machine['model']}"] if machine.get("family") is not None else []
    seen += ["AVX-512" if "avx512f" in machine["has"] else "no AVX-512"]
    seen += ["AMX"] if "amx_tile" in machine["has"] else []
    return ", ".join(seen + (["virtual"] if machine.get("is_virtual") else []))


if __name__ == "__main__":
    sys.exit(main())

"""Say what has run on a GPU so far and what has not, from the records of `make test-gpu` and `make bench-gpu`.

python -m benchmarks.gpu_runs
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS, is_stand_in

_NOT_YET = "has not run on a GPU yet"


def what_ran(folder: Path = RESULTS) -> list[str]:
    """A line for the tests, and a line for the benchmark, from the records in `folder`."""
    return [_tests(_read(folder / "gpu_tests.json")), _benchmark(_read(folder / "gpu.json"))]


def _read(path: Path) -> dict[str, Any] | None:
    found: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return None if found is None or is_stand_in(found["machine"]) else found


def _tests(record: dict[str, Any] | None) -> str:
    if record is None:
        return f"`make test-gpu` {_NOT_YET}."
    results = record["results"]
    counts = [f"{len(results[kind])} {kind}" for kind in ("passed", "failed") if results[kind]]
    counts += [f"{count} skipped ({reason})" for reason, count in sorted(results["skipped"].items())]
    code = results["code"]
    changed = ", with changes" if code.get("dirty") else ""
    return f"`make test-gpu` {_on(record)}, commit {str(code['commit'])[:12]}{changed}: {', '.join(counts)}."


def _benchmark(record: dict[str, Any] | None) -> str:
    if record is None:
        return f"`make bench-gpu` {_NOT_YET}."
    return f"`make bench-gpu` {_on(record)}: {record['results']['summary']}."


def _on(record: dict[str, Any]) -> str:
    machine, day = record["machine"], record["date"][:10]
    devices = machine["gpus"]
    return f"ran on {len(devices)} x {devices[0]}, torch {machine['torch']}, {day}"


def main() -> None:
    """Print the lines."""
    print("\n".join(what_ran()))


if __name__ == "__main__":
    main()

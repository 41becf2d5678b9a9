"""A run directory may come from a stranger: what reads one opens files through base/beneath.py, which is no place to
wait in, to fill the memory, or to follow a link from.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ["checkpoint", "cli", "distributed", "experiment", "launch", "observe", "record", "run"]
FOLDERS = [*(f"ddp_core/{room}" for room in ROOMS), "ddp_lab/chaos", "ddp_lab/report"]
OPENING = {"open", "read_text", "read_bytes"}
# What these files open is in no run directory.
ELSEWHERE = {
    "ddp_core/cli/bundle.py": "members of an archive that is being written",
    "ddp_core/cli/click_kinds.py": "the source of an installed command",
    "ddp_core/cli/training.py": "a file in a temporary folder of its own",
    "ddp_core/distributed/reports.py": "the launcher's folder for its workers",
    "ddp_core/live/member.py": "the launcher's folder for its workers",
    "ddp_core/experiment/file.py": "the experiment's file, known to be one; as text, whose line ends Python unifies",
    "ddp_core/experiment/source.py": "modules that this process has imported",
    "ddp_core/live/workers.py": "the launcher's folder for its workers",
    "ddp_core/observe/usage.py": "/proc",
    "ddp_core/record/bundles.py": "members of an archive, and new files in a temporary folder",
    "ddp_core/record/pins.py": "what pip tells of an installed package",
    "ddp_core/run/repeat.py": "/dev/null, and what processes of ours print into a temporary folder",
    "ddp_core/run/repeater.py": "/dev/null",
    "ddp_core/run/run.py": "the launcher's folder for its workers",
    "ddp_lab/chaos/drill.py": "the file of a drill",
    "ddp_lab/chaos/mirror.py": "a file that fills a disk of its own",
    "ddp_lab/chaos/shape.py": "/proc",
}


def opening_lines(file: Path) -> list[int]:
    """The lines in which a file is opened by Python's own means."""
    calls = [node for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, ast.Call)]
    names = ((call, getattr(call.func, "attr", getattr(call.func, "id", None))) for call in calls)
    return [call.lineno for call, name in names if name in OPENING]


@pytest.mark.parametrize("folder", FOLDERS)
def test_rooms_that_read_run_directories_open_files_in_one_way(folder: str) -> None:
    found = {
        str(file.relative_to(ROOT)): lines
        for file in sorted((ROOT / folder).rglob("*.py"))
        if (lines := opening_lines(file))
    }
    known = {place for place in ELSEWHERE if place.startswith(f"{folder}/")}
    assert {place: lines for place, lines in found.items() if place not in known} == {}, "use base/beneath.py"
    assert known - found.keys() == set(), "these open nothing any more"

"""What has run on GPUs, a JSON line for each result, appended as it comes: a killed command loses one line at most.

Every line says the commit and the place it is of (device, driver, torch), so lines of many commands may stand in one
file. Of two lines of one commit, place and item the later counts, and of speeds the median. Lines of a stand-in for
CUDA, which tests use, say so and are never merged.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import RESULTS
from ddp_core.record.environment import describe_code, describe_environment

NAME = "gpu_check.jsonl"
KEPT = RESULTS / NAME
LINES, HEAD = "DDP_GPU_LINES", "DDP_GPU_HEAD"
"""Variables: the file to which tests append their lines, and what each begins with, where that is known already."""
STAND_IN = "DDP_STANDIN_CUDA"
"""Variable: tests have put a stand-in in the place of CUDA (tests/support/standin_cuda)."""
CUT_OFF = "cut off"
"""The outcome of an item that still ran when the command's time was over; any other is final for commit and place."""

SPEED = "images_per_second"
COLLECTION = "collection"
"""The item that has the number of all tests, so that those that had no time are seen to be missing."""

Line = dict[str, Any]


def place() -> dict[str, Any]:
    """The GPUs of this machine: what tells one place from another. Starts CUDA in this process."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "devices": torch.cuda.device_count(),
        # A GPU that is cut into parts (MIG) keeps its name.
        "multiprocessors": properties.multi_processor_count,
        "driver": describe_environment()["cuda"]["driver"],
        "torch": torch.__version__,
    }


def head_of(on: Mapping[str, Any]) -> dict[str, Any]:
    """What all lines of a command begin with; `on` is `place()`."""
    code = describe_code()
    return {"commit": code["commit"], "dirty": code["dirty"], "on": dict(on), "stand_in": STAND_IN in os.environ}


def append(path: Path, head: Mapping[str, Any], line: Mapping[str, Any]) -> None:
    """Append one line, in one write: several processes may append to one file."""
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    text = json.dumps({**head, "date": date, **line}) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    # A line that was cut off when its writer was killed must not take this one with it.
    before = path.read_bytes()[-1:] if path.exists() else b"\n"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, (text if before in (b"\n", b"") else "\n" + text).encode())
    finally:
        os.close(file)


def read(path: Path) -> list[Line]:
    """The whole lines of a file; none where it is missing. What was cut off is left out."""
    found = []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and {"commit", "on", "item", "date"} <= line.keys():
            found.append(line)
    return found


def merge(sources: Iterable[Path], target: Path = KEPT) -> int:
    """Append the lines of these files that `target` lacks, but for those of a stand-in; returns their number."""
    known = {json.dumps(line, sort_keys=True) for line in read(target)}
    new = []
    for line in (line for source in sources for line in read(source)):
        text = json.dumps(line, sort_keys=True)
        if text not in known and not line["stand_in"]:
            known.add(text)
            new.append(line)
    for line in new:
        append(target, {}, line)
    return len(new)


def key(line: Mapping[str, Any]) -> str:
    """The commit and the place of a line, as one word."""
    return json.dumps([line["commit"], line["dirty"], line["on"], line["stand_in"]], sort_keys=True)


def by_item(lines: Iterable[Line], head: Mapping[str, Any]) -> dict[str, Line]:
    """The last line of each item, of the commit and place that `head` names.

    Where it has a speed, that is the median over all lines of the item that have one, and `rounds` is their number.
    """
    wanted, found = key(head), dict[str, list[Line]]()
    for line in lines:
        if key(line) == wanted:
            found.setdefault(line["item"], []).append(line)
    return {item: _of_rounds(each) for item, each in found.items()}


def _of_rounds(lines: Sequence[Line]) -> Line:
    """One for all lines of an item; a line that was cut off is no result where another one is."""
    last = ([line for line in lines if line["outcome"] != CUT_OFF] or lines)[-1]
    if SPEED not in last:
        return last
    speeds = [line[SPEED] for line in lines if SPEED in line]
    return last | {SPEED: median(speeds), "rounds": len(speeds)}


def newest_first(lines: Iterable[Line]) -> list[dict[str, Line]]:
    """The last line of each item, for each commit and place, that recorded last first; nothing of a stand-in."""
    kept = sorted((line for line in lines if not line["stand_in"]), key=lambda line: str(line["date"]))
    last = {key(line): line for line in reversed(kept)}
    return [by_item(kept, head) for head in last.values()]

"""Works through the list of `make gpu-check`, and appends what it finds."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import gpu_lines, gpu_runs
from benchmarks.gpu import TRACE
from benchmarks.gpu_items import Collection, Item, Place, Setting, items_of_tests, trainings_and_speeds
from benchmarks.record import RESULTS
from ddp_core.base.errors import ExitCode
from ddp_core.record.environment import describe_code
from tests.support.pool import in_processes
from tests.support.processes import load

ENDING_SECONDS = 3.0
"""What is running is killed so long before the command must end."""
SHORTEST = 8.0
"""Nothing is begun with less time than this."""


@dataclass(frozen=True)
class Wanted:
    """What of the list, where to, and how much at a time."""

    folder: Path
    slice_of: tuple[int, int] | None = None
    words: Sequence[str] | None = None
    again: bool = False
    jobs: int = 1

    def has(self, item: Item) -> bool:
        """Whether the item was asked for."""
        return self.words is None or any(word in f"{item.part} {item.name}" for word in self.words)


def check(wanted: Wanted, deadline: float) -> int:
    """Run the list until `deadline` (by time.monotonic); returns the exit code."""
    if describe_code()["commit"] is None:
        return _refused("the commit is not known: no git here, so name it: DDP_GIT_COMMIT=…", ExitCode.BAD_INPUT)
    stands_in = gpu_lines.head_of({})["stand_in"]
    if stands_in and wanted.folder.resolve() == RESULTS:
        return _refused("a stand-in's results do not belong into benchmarks/results: --out FOLDER", ExitCode.BAD_INPUT)
    load()
    with tempfile.TemporaryDirectory(prefix="ddp-gpu-check-", ignore_cleanup_errors=True) as scratch:
        setting = Setting(wanted.folder, Path(scratch), deadline, quick=stands_in)
        found = _find(setting, Place())
        if found["outcome"] == "no device":
            return _refused("torch finds no CUDA device here", ExitCode.RESOURCES)
        if found["outcome"] != "done":
            return _refused(f"the device cannot be used: {' | '.join(found['said'])}", ExitCode.RESOURCES)
        setting = replace(setting, head=gpu_lines.head_of(found.pop("found")))
        _keep(setting, Place(), found)
        return _check(wanted, setting)


def _check(wanted: Wanted, setting: Setting) -> int:
    if wanted.slice_of is None:
        run(trainings_and_speeds(), wanted, setting)
    ids: list[str] = []
    if setting.deadline - time.monotonic() > SHORTEST:
        collected = _find(setting, Collection())
        ids = collected.pop("ids", [])
        _keep(setting, Collection(), collected)
    # A test waits for the interpreters that it starts more than for the device.
    run(items_of_tests(ids, wanted.slice_of), replace(wanted, jobs=2 * wanted.jobs), setting)
    lines = gpu_lines.by_item(_lines(wanted.folder), setting.head)
    print("\n".join(gpu_runs.in_words(lines)))
    return 1 if gpu_runs.failures(lines) else ExitCode.DONE


def run(items: Sequence[Item], wanted: Wanted, setting: Setting) -> None:
    """Run those that were asked for and are not recorded yet; what is not begun in time is counted aloud."""
    done, asked = _done(wanted, setting), list(filter(wanted.has, items))
    waiting = [item for item in asked if item.name not in done]
    if len(waiting) < len(asked):
        print(f"gpu-check: {len(asked) - len(waiting)} recorded already", flush=True)
    begun = 0
    time_left = setting.deadline - time.monotonic() - SHORTEST
    for item, line in in_processes(
        waiting, lambda item: _run(setting, item), wanted.jobs, time_left, is_alone=lambda item: item.is_alone
    ):
        begun += 1
        _keep(setting, item, _died() if line is None else line)
    if begun < len(waiting):
        print(f"gpu-check: no time for {len(waiting) - begun} of {len(waiting)}; the same command goes on", flush=True)


def _run(setting: Setting, item: Item) -> dict[str, Any]:
    """The line of an item, in a process of its own."""
    began = time.monotonic()
    left = setting.deadline - ENDING_SECONDS - began
    seconds = min(item.seconds, left)
    try:
        with tempfile.TemporaryDirectory(dir=setting.scratch, ignore_cleanup_errors=True) as scratch:
            line = item.run(setting, Path(scratch), seconds)
    except Exception as error:
        line = {"outcome": "failed", "said": [f"{type(error).__name__}: {error}"]}
    took = time.monotonic() - began
    if line.get("outcome") == "failed" and left < item.seconds and took >= seconds:
        line["outcome"] = gpu_lines.CUT_OFF
    return line | {"seconds": round(took, 1)} if line else {}


def _find(setting: Setting, item: Item) -> dict[str, Any]:
    """The line of one item, which is not recorded."""
    ((_, line),) = in_processes([item], lambda item: _run(setting, item), 1, is_alone=lambda _: True)
    return _died() if line is None else line


def _died() -> dict[str, Any]:
    return {"outcome": "failed", "said": ["the process that runs it has died"]}


def _keep(setting: Setting, item: Item, line: dict[str, Any]) -> None:
    if line:
        gpu_lines.append(setting.folder / gpu_lines.NAME, setting.head, {"item": item.name, "part": item.part, **line})
    said = line.get("outcome", "recorded by its tests")
    tail = f": {line['said'][-1]}" if line.get("said") else ""
    print(f"{item.part:24} {item.name:70} {said}{tail}", flush=True)


def _lines(folder: Path) -> list[gpu_lines.Line]:
    files = dict.fromkeys([gpu_lines.KEPT.resolve(), (folder / gpu_lines.NAME).resolve()])
    return [line for file in files for line in gpu_lines.read(file)]


def _done(wanted: Wanted, setting: Setting) -> set[str]:
    """The items that need not run again."""
    lines = {} if wanted.again else gpu_lines.by_item(_lines(wanted.folder), setting.head)
    return {item for item, line in lines.items() if line["outcome"] != gpu_lines.CUT_OFF}


def merge(folders: Iterable[Path]) -> int:
    """Take the lines of these folders into benchmarks/results, and write the page."""
    folders = list(folders)
    if absent := [str(folder) for folder in folders if not (folder / gpu_lines.NAME).exists()]:
        return _refused(f"no {gpu_lines.NAME} in {', '.join(absent)}", ExitCode.BAD_INPUT)
    count = gpu_lines.merge(folder / gpu_lines.NAME for folder in folders)
    for folder in folders:
        if (trace := folder / TRACE).exists() and count:
            shutil.copy(trace, RESULTS / trace.name)
    print(f"gpu-check: {count} new lines in {gpu_lines.KEPT}; {gpu_runs.PAGE} is written")
    gpu_runs.write()
    return ExitCode.DONE


def _refused(why: str, code: ExitCode) -> int:
    print(f"gpu-check: {why}", file=sys.stderr)
    return code

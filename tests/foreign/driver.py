"""Trains one case on every layout, each process a fork of one that has torch and the case's packages loaded.

What that spares, the launcher and the import of torch, takes five seconds of processor time, which 300 cases on eight
layouts would pay 5,000 times.
"""

from __future__ import annotations

import gc
import signal
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ddp_core.base.errors import ExitCode
from ddp_core.record.directory import find_runs
from tests.foreign.fleet import GROUPS, Case
from tests.support import processes
from tests.support.pool import in_processes

Outcome = Literal["identical", "refused", "warned", "SILENT", "FAULT", "HANG", "not tried"]
"""identical: the weights, their average and the optimizer's state of `single`. refused: a line that says why, and exit
code 2 or 5. warned: other bits, and a warning that said so. SILENT: other bits, and nothing said. FAULT: any other end.
HANG: none within the time. not tried: `single` ended badly."""

BAD = {"SILENT", "FAULT", "HANG", "not tried"}
"""Outcomes that are faults of this project, or hide what might be one."""
_DIED = {"outcomes": {"single": "FAULT"}, "said": {"single": "the process that trains the case has died"}}

SECONDS, SECONDS_LARGE = 150, 600
"""How long one layout may take."""


@dataclass(frozen=True)
class Way:
    """A layout: the number of ranks that a launcher starts, 0 without one, and the words that ask for it."""

    ranks: int
    words: tuple[str, ...]


def _ddp(count: int, *more: str) -> Way:
    return Way(count, ("--layout", "ddp", "--nproc-per-node", str(count), *more))


WAYS: dict[str, Way] = {
    "single": Way(0, ("--layout", "single")),
    "dp x 2": Way(0, ("--layout", "dp", "--nproc-per-node", "2")),
    "ddp x 2": _ddp(2),
    "ddp x 2, strict": _ddp(2, "--guard", "strict"),
    "ddp x 3": _ddp(3),
    "shard optimizer": _ddp(2, "--shard", "optimizer"),
    "shard gradients": _ddp(2, "--shard", "gradients"),
    "shard parameters": _ddp(2, "--shard", "parameters"),
}
KILLED = "killed, resumed"
"""The last column: killed after step 1 on ddp x 2, and resumed on a layout that differs from case to case."""
COLUMNS = (*WAYS, KILLED)
RESUMED_ON = ("single", "dp x 2", "ddp x 3")


@dataclass(frozen=True)
class Ended(processes.Ended):
    """How the processes of one layout ended, and the digests of the result."""

    digests: tuple[str | None, ...] | None = None


def load(groups: Sequence[str]) -> None:
    """Load what the cases of these groups need."""
    processes.load([package for group in groups for package in GROUPS[group]])


def outcomes(
    cases: Sequence[Case], workers: int, seconds: float = float("inf")
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """What `run` finds for each case, some at a time, a large one alone; no case is begun after so many seconds.

    `load` comes before.
    """
    for case, found in in_processes(cases, run, workers, seconds, is_alone=lambda case: case.is_large):
        yield case, found or {**_DIED, "on": {}, "seconds": 0.0}


def run(case: Case, ways: Sequence[str] = COLUMNS) -> dict[str, Any]:
    """Train the case on these layouts, `single` first; return the outcomes, and what was said where one is not good."""
    with tempfile.TemporaryDirectory(prefix="ddp-foreign-") as scratch:
        return _run(case, ways, Path(scratch))


def _run(case: Case, ways: Sequence[str], scratch: Path) -> dict[str, Any]:
    began = time.monotonic()
    _import_for(case)
    outcomes: dict[str, str] = {}
    said: dict[str, str] = {}
    alone = _train(case, WAYS["single"], scratch / "single")
    for way in ways:
        if way == "single":
            ended = alone
        elif alone.code not in (ExitCode.DONE, ExitCode.BAD_INPUT, ExitCode.NUMERICS):
            outcomes[way] = "not tried"
            continue
        elif way == KILLED:
            ended = _kill_and_resume(case, scratch / "killed")
        else:
            ended = _train(case, WAYS[way], scratch / str(len(outcomes)))
        outcomes[way] = judge(ended, alone)
        if outcomes[way] != "identical":
            said[way] = ended.said[-1500:] if outcomes[way] in ("SILENT", "FAULT", "HANG") else one_line(ended.said)
    on = {KILLED: resumed_on(case)} if KILLED in ways else {}
    return {"outcomes": outcomes, "said": said, "on": on, "seconds": round(time.monotonic() - began, 1)}


def judge(ended: Ended, alone: Ended) -> Outcome:
    """What the end of a layout means beside that of `single`."""
    if ended.code is None:
        return "HANG"
    if ended.code in (ExitCode.BAD_INPUT, ExitCode.NUMERICS):
        return "refused"
    if ended.code != ExitCode.DONE or ended.digests is None:
        return "FAULT"
    if ended.digests == alone.digests:
        return "identical"
    return "warned" if "other bits" in ended.said else "SILENT"


def one_line(said: str) -> str:
    """The line that a user is told last, without the path of this machine."""
    lines = [line for line in said.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("error:", "ddp: error:"))]
    line = (told or lines or ["nothing was said"])[-1]
    return line.replace("ddp: ", "", 1).replace(str(Path.cwd()) + "/", "").strip()[:600]


def resumed_on(case: Case) -> str:
    """The layout on which the killed run of this case goes on: another one for each third case."""
    return RESUMED_ON[zlib.crc32(case.key.encode()) % len(RESUMED_ON)]


def _kill_and_resume(case: Case, output: Path) -> Ended:
    saving = ("--checkpoint-every", "1", "--synchronous-save")
    killed = _train(case, WAYS["ddp x 2"], output, *saving, "--fault", "kill@1:0")
    if killed.code not in (-signal.SIGKILL, None):
        return killed
    return _train(case, WAYS[resumed_on(case)], output, *saving, "--resume", "auto")


def _train(case: Case, way: Way, output: Path, *more: str) -> Ended:
    words = ["train", *case.words, *way.words, "--device", "cpu", "--output", str(output), "--log-every", "1", *more]
    launched = processes.launch(words, way.ranks, output, SECONDS_LARGE if case.is_large else SECONDS)
    records = [record for _, record in find_runs(output)]
    digests = None
    if launched.code is not None and len(records) == 1 and "weights_sha256" in records[0]:
        digests = tuple(records[0][f"{part}_sha256"] for part in ("weights", "optimizer", "ema"))
    return Ended(launched.code, launched.said, digests)


def _import_for(case: Case) -> None:
    """Import what the case's own model is made of, once for all its processes."""
    if case.group == "transformers":
        from tests.foreign.experiments.transformers_tiny import configuration

        task = case.settings[0].partition("=")[2]
        configuration(task, case.name)
        gc.freeze()

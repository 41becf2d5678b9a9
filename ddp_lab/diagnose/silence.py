"""Whether the processes of a script have fallen silent since all wait for each other, and where each stands.

Each process writes a trace of what it does. When none has written anything for long, and none has computed, each is
asked at which line it stands.
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from ddp_lab.diagnose.task import ended_file, task

SECONDS = 20.0
"""So long no process may do anything until it is said where all stand."""
_ASK_SECONDS = 5.0
"""Between two questions, both of which must have the same answer: one that is only slow has come on."""
_BUSY_SECONDS = 0.5
"""So much time of a processor is no work: threads that wait look around now and then."""
_LOOK_SECONDS = 1.0
_SIGNAL = signal.SIGRTMIN + 5 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
_WAITS = ("/torch/distributed/", "/torch/nn/parallel/distributed.py", "/torch/autograd/graph.py")
"""Where a rank stands in torch that waits for another one: in a collective, in DDP's forward, or in its backward."""
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')


def answer_where() -> None:
    """In a process of the script: write the lines at which its threads stand when it is asked."""
    stack = Path(task().traces, f"{os.getpid()}.stack").open("a")  # noqa: SIM115 - it is written at any time
    faulthandler.register(_SIGNAL, file=stack, all_threads=True)


class Silence:
    """Watches the processes of a run, and all that they have started, for the time in which none does anything."""

    def __init__(self, processes: Sequence[int], traces: Path, roots: Sequence[Path]) -> None:
        self._ranks = {process: rank for rank, process in enumerate(processes)}
        self._traces, self._roots = traces, roots
        self._since = self._looked = time.monotonic()
        self._written, self._spent, self._answer = 0, 0.0, ""

    def where(self) -> str:
        """Where the processes stand, if none has done anything for SECONDS and they wait for each other; else empty."""
        if (now := time.monotonic()) - self._looked < _LOOK_SECONDS:
            return ""
        self._looked, written = now, sum(file.stat().st_size for file in self._traces.glob("*.jsonl"))
        # A backward pass that computes for minutes stands at the line of one that waits for other ranks.
        spent, is_busy = self._look()
        if is_busy or written != self._written or abs(spent - self._spent) > _BUSY_SECONDS:
            self._since, self._written, self._spent, self._answer = now, written, spent, ""
        if now - self._since < SECONDS - _ASK_SECONDS:
            return ""
        self._since, before, self._answer = now - SECONDS + 2 * _ASK_SECONDS, self._answer, self._ask()
        return self._answer if self._answer == before else ""

    def _look(self) -> tuple[float, bool]:
        """The seconds of a processor that all have used; whether one of them uses it now, or would if it had one."""
        spent, is_busy = 0.0, False
        for process in self._ranks:
            try:
                for each in (here := psutil.Process(process), *here.children(recursive=True)):
                    spent += sum(each.cpu_times()[:2])
                    is_busy |= each.status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
            except psutil.Error:
                continue  # it, or one that it has started, has just ended
        return spent, is_busy

    def _ask(self) -> str:
        asked: dict[int, Path] = {}
        for file in self._traces.glob("*.stack"):
            os.truncate(file, 0)
            with suppress(ProcessLookupError):  # it was killed
                if not ended_file(self._traces, process := int(file.stem)).exists():
                    os.kill(process, _SIGNAL)
                    asked[process] = file
        time.sleep(_LOOK_SECONDS)  # for the answers
        stands = {process: self._stands(file.read_text()) for process, file in asked.items()}
        # Python's own helpers have no line of the script.
        stands = {process: each for process, each in stands.items() if each[0] or process in self._ranks}
        # One that waits for something else, such as a download, will yet come.
        if not stands or not all(waits for _, waits in stands.values()):
            return ""
        names = {process: f"rank {rank}" for process, rank in self._ranks.items() if len(self._ranks) > 1}
        told = [f"{names.get(each, f'process {each}')} stands in {line}" for each, (line, _) in stands.items() if line]
        return "; ".join([*told, *(f"{name} has ended" for process, name in names.items() if process not in asked)])

    def _stands(self, stacks: str) -> tuple[str, bool]:
        """The script's line in these stacks of one process, and whether it waits there for other ranks."""
        for stack in re.split(r"\n(?=Thread|Current thread)", stacks):
            frames = _FRAME.findall(stack)
            for file, number, _ in frames:
                for root in self._roots:
                    if Path(file).is_relative_to(root):
                        text = linecache.getline(file, int(number)).strip()
                        # A process that has started the ranks waits for their end.
                        waits = any(part in frames[0][0] for part in _WAITS) or "join" in (each[2] for each in frames)
                        return f"{Path(file).relative_to(root)}:{number} (`{text}`)", waits
        return "", False

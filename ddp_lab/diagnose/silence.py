"""Whether the processes of a script have fallen silent since all wait for each other, and where each stands."""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from ddp_lab.diagnose.variables import FOLDER

SECONDS = 20.0
"""So long no process may do anything until it is asked where it stands."""
_BUSY_SECONDS = 0.5
"""So much time of a processor is no work: threads that wait look around now and then."""
_LOOK_SECONDS = 1.0
_ANSWER_SECONDS = 5.0
_SIGNAL = signal.SIGRTMIN + 5 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
_WAITS = ("/torch/distributed/", "/torch/nn/parallel/distributed.py", "/torch/autograd/graph.py")
"""Where a rank stands in torch that waits for another one: in a collective, in DDP's forward, or in its backward."""
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')


def answer_where() -> None:
    """In a process of the script: write the lines at which its threads stand when it is asked."""
    stack = Path(os.environ[FOLDER], f"{os.getpid()}.stack").open("w")  # noqa: SIM115 - it is written at any time
    faulthandler.register(_SIGNAL, file=stack, all_threads=True)


class Silence:
    """Looks at some processes, and all that they have started, from time to time."""

    def __init__(self, processes: Sequence[int], traces: Path, roots: Sequence[Path]) -> None:
        self._ranks = {process: rank for rank, process in enumerate(processes)}
        self._traces, self._roots = traces, roots
        self._since = self._looked = time.monotonic()
        self._spent = 0.0

    def where(self) -> str:
        """Where the processes stand, if all have been silent for SECONDS and wait for each other; else empty."""
        if (now := time.monotonic()) - self._looked < _LOOK_SECONDS:
            return ""
        self._looked, (spent, is_busy) = now, self._look()
        if is_busy or abs(spent - self._spent) > _BUSY_SECONDS:
            self._since, self._spent = now, spent
        if now - self._since < SECONDS:
            return ""
        self._since = now
        return self._ask()

    def _look(self) -> tuple[float, bool]:
        """The seconds of a processor that they have used; whether one of them uses it now, or would if it had one."""
        spent, is_busy = 0.0, False
        for each in self._living():
            try:
                spent += sum(each.cpu_times()[:2])
                is_busy |= each.status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
            except psutil.Error:
                is_busy = True  # it has just ended
        return spent, is_busy

    def _living(self) -> list[psutil.Process]:
        found = []
        for process in self._ranks:
            try:
                every = (here := psutil.Process(process), *here.children(recursive=True))
                found += [each for each in every if each.status() != psutil.STATUS_ZOMBIE]
            except psutil.Error:
                continue  # it, or one that it has started, has just ended
        return found

    def _ask(self) -> str:
        asked = {each.pid: self._traces / f"{each.pid}.stack" for each in self._living()}
        asked = {process: file for process, file in asked.items() if file.exists()}
        for process in asked:
            with contextlib.suppress(ProcessLookupError):  # it may have just ended
                os.kill(process, _SIGNAL)
        until = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < until and not all(file.stat().st_size for file in asked.values()):
            time.sleep(_LOOK_SECONDS / 10)
        time.sleep(_LOOK_SECONDS / 10)  # a stack is written line by line
        stands = {process: self._stands(file.read_text()) for process, file in asked.items()}
        # One that waits for something else, such as a download, will yet come.
        if not stands or not all(waits for _, waits in stands.values()):
            return ""
        told = [f"{self._name(process)} stands in {line}" for process, (line, _) in stands.items() if line]
        ended = [f"rank {rank} has ended" for process, rank in self._ranks.items() if process not in asked]
        return "; ".join([*told, *(ended if len(self._ranks) > 1 else [])])

    def _name(self, process: int) -> str:
        return f"rank {self._ranks[process]}" if len(self._ranks) > 1 else f"process {process}"

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

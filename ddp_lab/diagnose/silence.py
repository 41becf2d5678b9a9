"""Whether the processes of a script have fallen silent since all wait for each other, and where each stands.

Each process writes from time to time at which lines its threads stand; and it writes a trace of all that it does.
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

from ddp_lab.diagnose.variables import FOLDER

SECONDS = 20.0
"""So long nothing may be traced until it is asked where all stand."""
_TELL_SECONDS = 5
_LATE_SECONDS = 3 * _TELL_SECONDS
"""Who has not told so long where it stands has ended."""
_LOOK_SECONDS = 1.0
_WAITS = ("/torch/distributed/", "/torch/nn/parallel/distributed.py", "/torch/autograd/graph.py")
"""Where a rank stands in torch that waits for another one: in a collective, in DDP's forward, or in its backward."""
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')


def tell_where() -> None:
    """In a process of the script: write from time to time the lines at which its threads stand."""
    stacks = Path(os.environ[FOLDER], f"{os.getpid()}.stacks").open("w")  # noqa: SIM115 - it is written at any time
    faulthandler.dump_traceback_later(_TELL_SECONDS, repeat=True, file=stacks)


class Silence:
    """Looks from time to time at the processes that have been started, and at all that these have started."""

    def __init__(self, processes: Sequence[int], traces: Path, roots: Sequence[Path]) -> None:
        self._ranks = {process: rank for rank, process in enumerate(processes)}
        self._traces, self._roots = traces, roots
        self._since = self._looked = time.monotonic()
        self._written = 0

    def where(self) -> str:
        """Where the processes stand, if nothing was traced for SECONDS and they wait for each other; else empty."""
        if (now := time.monotonic()) - self._looked < _LOOK_SECONDS:
            return ""
        self._looked, written = now, sum(file.stat().st_size for file in self._traces.glob("*.jsonl"))
        if written != self._written:
            self._since, self._written = now, written
        if now - self._since < SECONDS:
            return ""
        told = {int(file.stem): file for file in self._traces.glob("*.stacks")}
        told = {process: file for process, file in told.items() if time.time() - file.stat().st_mtime < _LATE_SECONDS}
        stands = {process: self._stands(file.read_text()) for process, file in told.items()}
        # Python's own helpers have no line of the script.
        stands = {process: each for process, each in stands.items() if each[0] or process in self._ranks}
        # One that waits for something else, such as a download, will yet come; so will one that moves.
        if not stands or not all(waits for _, waits in stands.values()):
            return ""
        said = [f"{self._name(process)} stands in {line}" for process, (line, _) in stands.items() if line]
        ended = [f"rank {rank} has ended" for process, rank in self._ranks.items() if process not in told]
        return "; ".join([*said, *(ended if len(self._ranks) > 1 else [])])

    def _name(self, process: int) -> str:
        return f"rank {self._ranks[process]}" if len(self._ranks) > 1 else f"process {process}"

    def _stands(self, told: str) -> tuple[str, bool]:
        """The script's line where a process stands, and whether it waits there for other ranks, each time it told."""
        lines = [self._line(stacks) for stacks in re.split(r"^Timeout .*\n", told, flags=re.MULTILINE)[-3:]]
        return lines[-1][0], all(waits for _, waits in lines)

    def _line(self, stacks: str) -> tuple[str, bool]:
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

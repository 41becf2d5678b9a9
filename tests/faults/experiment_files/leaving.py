"""Does a process that leaves with exit code 0 in mid-training look like success?

LEAVES in the environment is a rank, and how it leaves in its third step or later: `os._exit`, `c` (SystemExit where C
code calls Python), or `_exit` (the system's own). With `import` the file leaves when it is run.
"""

import ctypes
import os

from dots import dots, experiment
from torch import Tensor, nn

__all__ = ["dots", "experiment", "network"]

RANK, _, HOW = os.environ.get("LEAVES", "-1 ").partition(" ")


def leave() -> None:
    if HOW == "c":
        ctypes.pythonapi.PyRun_SimpleString(b"import sys; sys.exit()")
    elif HOW == "_exit":
        ctypes.CDLL(None)._exit(0)
    else:
        os._exit(0)


class Leaving(nn.Linear):
    """Leaves in its tenth forward."""

    forwards = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.forwards += 1
        if self.forwards == 10 and os.environ.get("RANK", "0") == RANK:
            leave()
        return super().forward(inputs)


if HOW == "import":
    leave()


def network(width: int = 12) -> nn.Module:
    return nn.Sequential(Leaving(6, width), nn.Linear(width, 3))

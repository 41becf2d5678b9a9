"""Does a process that leaves with exit code 0 in mid-training look like success?

LEAVES in the environment is a rank, and how it leaves in its third step or later: `os._exit`, `c` (SystemExit where C
code calls Python), or `_exit` (the system's own). With `import` the file leaves when it is run.
"""

import ctypes
import os

import torch
from torch import Tensor, nn

from ddp_core.config.experiment import Component, Experiment
from ddp_core.data.splits import InMemory, Splits, content_digest

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


def dots() -> Splits:
    inputs, targets = torch.arange(48.0).reshape(24, 2) / 48, torch.arange(24) % 3
    return Splits(InMemory(inputs, targets), None, 3, None, content_digest(inputs, targets))


def network() -> nn.Module:
    return Leaving(2, 3)


experiment = Experiment(
    name="leaving",
    model=Component(name="network"),
    data=Component(name="dots"),
    loss="cross_entropy",
    global_batch_size=4,
    micro_batch=1,
    epochs=2,
)

"""A small project of a user's own: an experiment file that imports a module beside it and a package."""

from __future__ import annotations

from pathlib import Path

BESIDE = "def squares(outputs, targets):\n    return (outputs - targets).square().sum()\n"
BIG = """\
from torch import nn


def big(width: int = 5):
    return nn.Sequential(nn.Linear(10, width), nn.Sigmoid(), nn.Linear(width, 1))
"""
MINE = '''\
"""Does code beside the experiment's file count?"""

import os
import time
from pathlib import Path

import torch
from beside import squares
from nets.big import big

from ddp_core.data.splits import Splits
from ddp_core.config.experiment import Component, Experiment, Optimizer

HERE = Path(__file__).parent


class Items:
    """Samples drawn from their index; they wait until the file that WAIT_FOR names exists."""

    def __init__(self, size, shift=0.0):
        self.size, self.shift = size, shift

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        while "WAIT_FOR" in os.environ and not Path(os.environ["WAIT_FOR"]).exists():
            time.sleep(0.01)
        generator = torch.Generator().manual_seed(index)
        shift = self.shift if index == 3 else 0.0
        return torch.randn(10, generator=generator) + shift, torch.randn(1, generator=generator)


def items(root, size: int = 32, digest: str = ""):
    """Sample 3 is moved by what stands in the file `shift` of the data directory."""
    file = root / "shift"
    return Splits(Items(size, float(file.read_text()) if file.exists() else 0.0), Items(8), digest=digest)


def random_items():
    class Random(Items):
        def __getitem__(self, index):
            return torch.randn(10), torch.randn(1)

    return Splits(Random(32))


def filed_items(root):
    files = sorted(root.rglob("*.txt"))
    numbers = torch.tensor([[float(file.read_text())] * 10 for file in files])
    return Splits([(row, row[:1]) for row in numbers], files=files)


experiment = Experiment(
    name="mine",
    model=Component(name="big"),
    data=Component(name="items"),
    loss="squares",
    optimizer=Optimizer(name="sgd", lr=0.01, momentum=0.9),
    global_batch_size=16,
    micro_batch=4,
    epochs=2,
)
'''


def write_project(folder: Path) -> Path:
    """Write the project's files into a folder; returns the experiment's file. Two steps per epoch, four in all."""
    (folder / "nets").mkdir(parents=True)
    (folder / "nets" / "__init__.py").touch()
    (folder / "nets" / "big.py").write_text(BIG)
    (folder / "beside.py").write_text(BESIDE)
    (folder / "mine.py").write_text(MINE)
    return folder / "mine.py"


def edit(file: Path, old: str, new: str) -> None:
    """Replace a part of a file, which must be there."""
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))

"""What torch's loss scaling cannot do is refused by name before the first step."""

from __future__ import annotations

from pathlib import Path

from tests.support.commands import ddp

FILE = """
import torch
from torch import nn

from ddp_core import Experiment, InMemory, Splits


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.wave = nn.Linear(4, 2), nn.Parameter(torch.ones(2, dtype=torch.complex64))

    def forward(self, rows):
        return self.layer(rows) * self.wave.abs()


def model():
    return Waves()


def data():
    return Splits(InMemory(torch.ones(8, 4), torch.ones(8, dtype=torch.int64)), None)


experiment = Experiment(name="waves", global_batch_size=4, micro_batch=2, precision="fp16")
"""


def test_a_complex_parameter_is_refused_with_fp16(tmp_path: Path) -> None:
    (tmp_path / "waves.py").write_text(FILE)
    words = ("train", tmp_path / "waves.py", "--device", "cpu", "--output", tmp_path / "runs")
    ended = ddp(*words)
    assert ended.code == 2, ended.errors
    assert "precision fp16: wave is complex" in ended.errors
    assert "Traceback" not in ended.errors

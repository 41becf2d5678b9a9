"""torch.compile keeps the promise on every layout but `dp`, which refuses it: each replica would be a copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import ddp, train

TEXT = """
from torch import nn
import torch
from ddp_core import Component, Experiment

def model():
    layers = nn.Sequential(nn.Linear(10, 24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 1))
    {}
    return layers

experiment = Experiment(
    name="mine", data=Component(name="toy_data"), loss="mean_squared_error", global_batch_size=8, micro_batch=2,
    max_steps=3,
)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)  # every process compiles for itself
def test_a_compiled_model_has_one_digest(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TEXT.format("layers.compile()"))
    alone, ranks = (train(tmp_path / str(count), tmp_path / "mine.py", ranks=count) for count in (0, 2))
    assert alone["weights_sha256"] == ranks["weights_sha256"]


PART = 'layers[0] = torch.compile(layers[0], backend="eager")'


@pytest.mark.parametrize("made", [PART, 'layers[0].compile(backend="eager")'])
def test_replicas_of_a_compiled_model_are_refused(made: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TEXT.format(made))
    words = ("train", tmp_path / "mine.py", "--device", "cpu", "--output", tmp_path / "out", "--layout", "dp")
    ended = ddp(*words, "--nproc-per-node", "2")
    assert ended.code == 2, ended.errors
    assert "torch.compile under --layout dp" in ended.errors

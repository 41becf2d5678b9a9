"""What the builders of model and data draw from the global generators follows from a seed."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from ddp_core.experiment.file import load_experiment
from ddp_core.experiment.request import build_model, build_splits

FILE = """
import random

import numpy as np
import torch
from ddp_core import Experiment, InMemory, Splits

{before}

def drawn():
    return random.random() + np.random.rand() + float(torch.rand(()))

def model():
    layer = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(layer.weight, drawn())
    return layer

def data():
    return Splits(InMemory(torch.full((8, 2), drawn()), torch.zeros(8, dtype=torch.long)))

experiment = Experiment(name="mine", global_batch_size=4, seed={seed})
"""


def built(folder: Path, before: str = "", seed: int = 0) -> tuple[float, float]:
    """A weight and a sample, in a process where somebody may have drawn before."""
    file = folder / "mine.py"
    file.write_text(FILE.format(before=before, seed=seed))
    random.seed()
    np.random.seed()
    experiment = load_experiment(str(file))
    weight = build_model(experiment, "cpu").weight.detach()[0, 0]  # type: ignore[index, operator]
    return float(weight), float(build_splits(experiment, Path("data")).train[0][0][0])


def test_weights_follow_from_the_seed_and_data_are_the_same_for_all(tmp_path: Path) -> None:
    weight, sample = built(tmp_path)
    assert built(tmp_path) == (weight, sample)
    other, same = built(tmp_path, seed=1)
    assert (other != weight, same) == (True, sample)


def test_what_the_file_has_seeded_stays_so(tmp_path: Path) -> None:
    before = "random.seed(1); np.random.seed({})"
    one, again, other = (built(tmp_path, before.format(number)) for number in (1, 1, 2))
    assert one == again
    assert one[0] != other[0]
    assert one[1] != other[1]

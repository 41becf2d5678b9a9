"""What the builders of model and data draw from the global generators follows from a seed."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from ddp_core.experiment.file import LoadedExperiment, load_experiment
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


def loaded(folder: Path, before: str = "", seed: int = 0) -> LoadedExperiment:
    file = folder / "mine.py"
    file.write_text(FILE.format(before=before, seed=seed))
    # Another test of this process may have seeded them with a number.
    random.seed()
    np.random.seed()
    return load_experiment(str(file))


def weight(experiment: LoadedExperiment) -> float:
    return float(build_model(experiment, "cpu").weight.detach()[0, 0])  # type: ignore[index, operator]


def sample(experiment: LoadedExperiment) -> float:
    return float(build_splits(experiment, Path("data")).train[0][0][0])


def test_weights_follow_from_the_seed_and_data_are_the_same_for_all(tmp_path: Path) -> None:
    first, again = (loaded(tmp_path) for _ in range(2))
    other = loaded(tmp_path, seed=1)
    assert sample(first) == sample(again) == sample(other)
    assert weight(first) == weight(again) != weight(other)


@pytest.mark.parametrize("made", [weight, sample])
def test_what_the_file_has_seeded_stays_so(made: object, tmp_path: Path) -> None:
    before = "random.seed(1); np.random.seed({})"
    assert callable(made)
    assert made(loaded(tmp_path, before.format(1))) == made(loaded(tmp_path, before.format(1)))
    assert made(loaded(tmp_path, before.format(1))) != made(loaded(tmp_path, before.format(2)))

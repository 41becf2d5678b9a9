"""A model builder whose weights follow from more than the seed is refused; others are built as they were."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from ddp_core.base.errors import UserError
from ddp_core.experiment.file import load_experiment
from ddp_core.experiment.request import build_model

FILE = """
import os, random, time
from time import sleep

import numpy as np
import torch
from ddp_core import Component, Experiment

{before}

calls = []

def model():
    calls.append(torch.get_rng_state())
    {body}
    print("built")
    return torch.nn.Linear(2, 2)

experiment = Experiment(
    name="mine", model=Component(name="model"), data=Component(name="toy_data"), global_batch_size=4, epochs=1
)
"""
INIT = "layer = torch.nn.Linear(2, 2); torch.nn.init.constant_(layer.weight, {}); return layer"


def build(folder: Path, body: str, before: str = "") -> tuple[torch.nn.Module, int]:
    """The model, and how often the builder was called."""
    file = folder / "mine.py"
    file.write_text(FILE.format(before=before, body=body))
    loaded = load_experiment(str(file))
    model = build_model(loaded, "cpu")
    return model, len(loaded.namespace["calls"])


@pytest.mark.parametrize(
    "body",
    [
        "torch.manual_seed(int(time.time()))",
        "torch.manual_seed(time.time_ns())",
        "torch.seed()",
        "torch.manual_seed(int.from_bytes(os.urandom(4)))",
        INIT.format("random.SystemRandom().random()"),
        INIT.format("np.random.default_rng().random()"),
        INIT.format("len(calls)"),
    ],
)
def test_weights_that_follow_from_more_than_the_seed_are_refused(body: str, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"model model has other weights when it is built again .*weight differs.*; draw"
    ):
        build(tmp_path, body)


def test_a_model_is_built_once_where_a_second_call_has_shown_all_it_can(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE.format(before="", body=""))
    loaded = load_experiment(str(file))
    build_model(loaded, "cpu", is_known=True)
    assert len(loaded.namespace["calls"]) == 1


def test_weights_drawn_from_any_global_generator_follow_from_the_seed(tmp_path: Path) -> None:
    body = INIT.format("random.random() + np.random.rand() + float(torch.rand(()))")
    # Another test of this process may have seeded them with a number.
    random.seed()
    np.random.seed()
    first, calls = build(tmp_path, body)
    second, _ = build(tmp_path, body)
    assert calls == 2
    assert torch.equal(first.weight, second.weight)


def test_what_the_file_has_seeded_stays_so(tmp_path: Path) -> None:
    body = INIT.format("random.random() + np.random.rand()")
    first, _ = build(tmp_path, body, "random.seed(1); np.random.seed(1)")
    second, _ = build(tmp_path, body, "random.seed(1); np.random.seed(2)")
    assert not torch.equal(first.weight, second.weight)
    expected = random.Random(1).random() + np.random.RandomState(1).rand()
    assert float(first.weight.detach()[0, 0]) == pytest.approx(expected)


def test_a_second_call_leaves_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, calls = build(tmp_path, "pass")
    after = torch.get_rng_state()
    torch.manual_seed(0)
    expected = torch.nn.Linear(2, 2)
    assert calls == 2
    assert torch.equal(model.weight, expected.weight)
    assert torch.equal(torch.get_rng_state(), after)
    assert capsys.readouterr().out == "built\n"
    assert abs(time.time() - time.clock_gettime(time.CLOCK_REALTIME)) < 60


def test_what_takes_long_or_can_be_called_once_is_called_once_or_believed(tmp_path: Path) -> None:
    assert build(tmp_path, "sleep(0.2)")[1] == 1
    assert build(tmp_path, "assert len(calls) == 1")[1] == 2

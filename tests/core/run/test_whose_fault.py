"""What the user's code did ends with 2 and says so, never as a fault of ours; torch's raw errors are put in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_core.base.errors import ExitCode
from tests.core.test_bad_input import MODES
from tests.support.commands import Ended, ddp, trained

HEAD = """
import os
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from ddp_core.config.experiment import Component, Experiment
from ddp_core.data.splits import Splits
from ddp_core.observe.callback import Callback

def model():
    return nn.Linear(4, 3)

def label(index):
    return index % 3

def data():
    numbers = torch.Generator().manual_seed(1)
    samples = torch.randn(32, 4, generator=numbers)
    return Splits([(sample, torch.tensor(label(index))) for index, sample in enumerate(samples)])

experiment = Experiment(name="mine", global_batch_size=8, micro_batch=2, epochs=2)
"""
OTHER_WEIGHTS = """
class Changes(Callback):
    ranks = "all"

    def on_step(self, moment):
        if moment.step == 3 and moment.rank == 1:
            with torch.no_grad():
                moment.model.bias += 1

callbacks = [Changes()]
"""
OTHER_WIDTH = """
def model():
    return nn.Linear(4, 3 + int(os.environ["RANK"]))
"""
CHECKPOINTED_TWICE = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.again, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, inputs):
        found = self.first(inputs)
        for _ in range(2):
            found = checkpoint(self.again, found, use_reentrant=True)
        return self.last(found)

def model():
    return Net()
"""
ONE_WITHOUT = """
def model():
    import os
    if os.environ.get("RANK") == "1":
        raise ValueError("no licence here")
    return nn.Linear(4, 3)
"""
LABEL = """
def label(index):
    return 7 if index in (5, 21) else index % 3
"""
NO_SUM = """
def loss(outputs, targets):
    return functional.cross_entropy(outputs, targets, reduction="none")
"""
NO_GRADIENT = """
def loss(outputs, targets):
    return functional.cross_entropy(outputs.detach(), targets, reduction="sum")
"""


def end_of(text: str, mode: str, folder: Path) -> tuple[Ended, str]:
    """How the run ended, and its last `error:` line."""
    (folder / "mine.py").write_text(HEAD + text)
    ended = ddp("train", folder / "mine.py", *MODES[mode], "--output", folder / "out")
    assert ended.code == ExitCode.BAD_INPUT, ended.errors
    assert "fault of ddp itself" not in ended.errors
    return ended, next(line for line in reversed(ended.errors.splitlines()) if line.startswith("ddp: error"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            OTHER_WEIGHTS,
            "after step 4 parameter bias is not the same on all ranks (differs: 0, 1 of 2), so this step is not saved",
        ),
        (OTHER_WIDTH, "rank 1 has built another model than rank 0: weight [4, 4] float32, where rank 0 has weight [3"),
        (ONE_WITHOUT, "ValueError: no licence here"),
    ],
    ids=["other weights", "other width", "one without"],
)
def test_ranks_that_differ_are_the_users_to_mend(text: str, said: str, tmp_path: Path) -> None:
    _, line = end_of(text, "torchrun", tmp_path)
    assert said in line
    if text == OTHER_WEIGHTS:
        assert trained(tmp_path / "out")[1]["exit_code"] == ExitCode.BAD_INPUT


def test_a_layer_that_is_checkpointed_twice_under_ddp(tmp_path: Path) -> None:
    ended, _ = end_of(CHECKPOINTED_TWICE, "torchrun", tmp_path)
    assert ended.errors.count("call checkpoint with use_reentrant=False") > 0
    assert "use_reentrant=False" in trained(tmp_path / "out")[1]["message"]


@pytest.mark.parametrize("mode", ["single", "dp", "torchrun"])
def test_a_label_without_a_class_is_named_with_its_samples(mode: str, tmp_path: Path) -> None:
    ended, line = end_of(LABEL, mode, tmp_path)
    assert "IndexError: Target 7 is out of bounds" in line
    assert "your model's outputs, of shape [2, 3], have no class for it" in line
    assert "sample ids 5" in line or "sample ids 21" in line
    assert "Traceback" not in ended.errors, "no frame of it is the user's"


@pytest.mark.parametrize("mode", ["single", "dp", "torchrun"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (NO_SUM, "loss returned a tensor of shape [2]; let it return one number as a tensor of shape []"),
        (NO_GRADIENT, "loss has no gradient, because nothing that is trained leads to it"),
    ],
    ids=["no sum", "no gradient"],
)
def test_a_loss_that_cannot_be_trained_with_is_refused(text: str, said: str, mode: str, tmp_path: Path) -> None:
    ended, line = end_of(text, mode, tmp_path)
    assert said in line
    assert "Traceback" not in ended.errors
    directory, record = trained(tmp_path / "out")
    assert said in record["message"]
    assert '"kind": "step"' not in directory.metrics.read_text()

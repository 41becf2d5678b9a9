"""Lazy layers and tables in buffers are made before training, the same on every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ddp_core.base.digests import weights_digest
from ddp_core.base.errors import ExitCode
from ddp_core.experiment.file import load_experiment
from ddp_core.experiment.request import build_parts
from ddp_core.record.reading import Run
from tests.core.run.test_run import HEAD
from tests.core.test_bad_input import MODES
from tests.support.commands import ddp, train, trained

LAZY = """
def model():
    return nn.Sequential(nn.LazyLinear(5), nn.Dropout(0.5), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(3))
"""
EAGER = """
def model():
    return nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
"""
UNUSED_LAZY = """
class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        self.other = nn.LazyLinear(3)

def model():
    return Net()
"""
TABLES = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("zeros", torch.zeros(4))
        self.register_buffer("none", None, persistent=False)
        self.register_buffer("grown", torch.empty(0), persistent=False)
        self.register_buffer("unknown", torch.tensor([float("nan"), 1.0]))
        self.filled = False

    def forward(self, inputs):
        if not self.filled:
            self.zeros.copy_(torch.arange(4.0).cos())
            self.none = torch.arange(4.0).sin()
            self.filled = True
        if len(self.grown) < inputs.shape[-1]:
            self.grown = torch.arange(inputs.shape[-1]) * 0.1
        return self.layer(inputs * self.zeros + self.none + self.grown)

def model():
    return Net()

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="sum")
"""
SCALE_OF_THE_FIRST = """
class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)
        self.register_buffer("scale", torch.zeros(4))

    def forward(self, inputs):
        if not self.scale.any():
            self.scale.copy_(inputs.std(0))
        return super().forward(inputs / self.scale)

def model():
    return Net()
"""


def written(folder: Path, text: str) -> Path:
    (folder / "mine.py").write_text(HEAD + text)
    return folder / "mine.py"


def built(folder: Path, text: str) -> nn.Module:
    return build_parts(load_experiment(str(written(folder, text))), Path("data")).model


def test_lazy_layers_draw_what_the_same_layers_with_sizes_draw(tmp_path: Path) -> None:
    lazy, eager = built(tmp_path, LAZY), built(tmp_path, EAGER)
    assert weights_digest(lazy.state_dict()) == weights_digest(eager.state_dict())
    assert all(layer.training for layer in lazy.modules())
    assert type(lazy[0]) is nn.Linear


@pytest.mark.full
@pytest.mark.parametrize(("text", "others"), [(LAZY, ["torchrun"]), (TABLES, ["dp", "shards"])], ids=["lazy", "tables"])
def test_every_layout_ends_with_the_same_weights(text: str, others: list[str], tmp_path: Path) -> None:
    file, digests = written(tmp_path, text), set()
    layouts = MODES | {"shards": [*MODES["torchrun"], "--shard", "parameters"]}
    for name in ("single", *others):
        digests.add(train(tmp_path / name, file, *layouts[name])["weights_sha256"])
    assert len(digests) == 1
    if text == LAZY:
        model = Run(trained(tmp_path / "single")[0].path).load_model()
        assert model(torch.zeros(2, 4)).shape == (2, 3)


def test_a_run_with_tables_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    file = written(tmp_path, TABLES)
    whole = ddp("train", file, "--output", tmp_path / "whole")
    killed = ddp("train", file, "--checkpoint-every", "2", "--fault", "raise@2", "--output", tmp_path / "two")
    again = ddp("train", file, "--checkpoint-every", "2", "--resume", "auto", "--output", tmp_path / "two")
    assert (whole.code, killed.code, again.code) == (0, 2, 0), again.errors
    records = [trained(tmp_path / name)[1] for name in ("whole", "two")]
    assert records[0]["weights_sha256"] == records[1]["weights_sha256"]


def test_what_depends_on_a_micro_batch_is_left_to_the_reduction_to_refuse(tmp_path: Path) -> None:
    assert not dict(built(tmp_path, SCALE_OF_THE_FIRST).named_buffers())["scale"].any(), "the trial left a trace"


def test_a_lazy_layer_that_no_forward_uses_is_refused(tmp_path: Path) -> None:
    ended = ddp("train", written(tmp_path, UNUSED_LAZY), "--output", tmp_path / "out")
    assert ended.code == ExitCode.BAD_INPUT
    assert "no forward gives other.weight its values" in ended.errors

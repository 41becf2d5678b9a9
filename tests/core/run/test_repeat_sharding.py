"""An optimizer that says wrongly that ranks may each update a part of a parameter is found by the rehearsal."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_core.base.errors import ExitCode
from ddp_core.record.directory import find_runs
from tests.support.commands import ddp

FILE = """
import math
import torch
from torch import nn
from ddp_core import Experiment, InMemory, Splits

def data():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(48, 10, generator=generator)
    return Splits(InMemory(inputs, (inputs.sum(1) > 0).long()), None)

def model():  # large enough for a cut, which lies between blocks of 1024 elements
    return nn.Sequential(nn.Linear(10, 512), nn.Tanh(), nn.Linear(512, 2))

class Own(torch.optim.SGD):
    elementwise = True

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, lr=lr)
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    update(each, each.grad, self.param_groups[0]["count"])

def optimizer(model, lr: float = 0.1):
    return Own(model.parameters(), lr=lr)

experiment = Experiment(name="mine", global_batch_size=16, micro_batch=4, epochs=2)
"""
HEALTHY = """
def update(weight, gradient, count):
    weight.sub_(gradient / (gradient.abs() + 0.1), alpha=0.1)
"""
NORM = """
def update(weight, gradient, count):
    weight.sub_(gradient * weight.norm(), alpha=0.1)
"""
CASES = {
    "the norm of a parameter": NORM,
    "the neighbours": """
def update(weight, gradient, count):
    weight.sub_(gradient - gradient.view(-1).roll(1).view(gradient.shape), alpha=0.1)
""",
    "noise": """
def update(weight, gradient, count):
    weight.sub_(gradient + 0.01 * torch.randn_like(weight), alpha=0.1)
""",
    "the size": """
def update(weight, gradient, count):
    weight.sub_(gradient, alpha=0.1 / math.sqrt(weight.numel()))
""",
    "the dimensions": """
def update(weight, gradient, count):
    weight.sub_(gradient, alpha=0.1 if weight.dim() > 1 else 0.2)
""",
    "the largest gradient in every third step": """
def update(weight, gradient, count):
    weight.sub_(gradient / (gradient.abs().max() if count % 3 == 0 else 1), alpha=0.1)
""",
    "a hook that limits each gradient": HEALTHY
    + """
_own = optimizer

def optimizer(model, lr: float = 0.1):
    made = _own(model, lr)

    def limit(*_):
        for group in made.param_groups:
            for each in group["params"]:
                each.grad.div_(each.grad.norm() + 1)

    made.register_step_pre_hook(limit)
    return made
""",
}
FAST = {("the norm of a parameter", "optimizer")}


def trained(folder: Path, text: str, shard: str) -> tuple[int, str]:
    (folder / "mine.py").write_text(FILE + text, encoding="utf-8")
    begin = ("train", folder / "mine.py", "--device", "cpu", "--rehearsal", "on", "--output", folder / "out")
    ended = ddp(*begin, "--layout", "ddp", "--nproc-per-node", "2", "--shard", shard)
    return ended.code, ended.errors


@pytest.mark.parametrize(
    ("rule", "shard"),
    [
        pytest.param(rule, shard, marks=() if (rule, shard) in FAST else pytest.mark.slow)
        for rule in CASES
        for shard in ("optimizer", "parameters")
    ],
)
def test_a_rule_that_says_wrongly_that_it_is_elementwise_is_refused(rule: str, shard: str, tmp_path: Path) -> None:
    code, said = trained(tmp_path, CASES[rule], shard)
    assert code == ExitCode.BAD_INPUT, said
    assert "first in step " in said
    assert list(find_runs(tmp_path / "out")) == []


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
def test_a_rule_that_says_so_rightly_trains(shard: str, tmp_path: Path) -> None:
    code, said = trained(tmp_path, HEALTHY, shard)
    assert code == 0, said
    assert "rehearsed in " in said

"""An optimizer that says wrongly that ranks may each update a part of a parameter is found by the rehearsal."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_core.base.errors import ExitCode
from ddp_core.record.directory import find_runs
from tests.core.run.test_repeat import TWO, trained

FILE = """
def model():  # large enough for a cut, which lies between blocks of 1024 elements
    return nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 2))

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


@pytest.mark.parametrize(
    ("rule", "shard"),
    [
        pytest.param(rule, shard, marks=() if (rule, shard) in FAST else pytest.mark.slow)
        for rule in CASES
        for shard in ("optimizer", "parameters")
    ],
)
def test_a_rule_that_says_wrongly_that_it_is_elementwise_is_refused(rule: str, shard: str, tmp_path: Path) -> None:
    ended = trained(tmp_path, FILE + CASES[rule], *TWO, "--shard", shard)
    assert ended.code == ExitCode.BAD_INPUT, ended.errors
    assert "first in step " in ended.errors
    assert list(find_runs(tmp_path / "out")) == []


@pytest.mark.slow
def test_a_rule_that_says_so_rightly_trains(tmp_path: Path) -> None:
    ended = trained(tmp_path, FILE + HEALTHY, *TWO, "--shard", "parameters")
    assert ended.code == 0, ended.errors
    assert "rehearsed in " in ended.errors

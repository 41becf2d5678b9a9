"""What an optimizer keeps is saved, or refused by name after its first update; it is never a fault of ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import ddp, train, trained

EXPERIMENT = '''
"""An optimizer that keeps its gradients in a way of its own."""

import torch
from ddp_core import Experiment, InMemory, Splits
from ddp_core.config.experiment import Component


def data():
    rows = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
    return Splits(InMemory(rows, (rows.sum(1) > 0).long()), None)


def model():
    return torch.nn.Linear(5, 2)


class Keeps(torch.optim.Optimizer):
    elementwise = True

    def __init__(self, parameters, keep):
        super().__init__(parameters, {"lr": 0.1})
        self.keep, self.steps = keep, 0
        for parameter in self.param_groups[0]["params"] if keep == "chosen" else ():
            chosen = parameter.detach().abs() > 0.3
            chosen.view(-1)[0] = False
            self.state[parameter]["chosen"] = chosen

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if self.keep == "floats":
                kept = state.setdefault("kept", {0.0: torch.zeros_like(parameter), 0.9: torch.zeros_like(parameter)})
                for factor, average in kept.items():
                    average.mul_(factor).add_(parameter.grad)
                    parameter.sub_(average, alpha=0.1)
            elif self.keep == "chosen":
                chosen = state["chosen"].bool()
                average = state.setdefault("average", torch.zeros(int(chosen.sum())))
                parameter[chosen] -= average.add_(parameter.grad[chosen])
            elif self.keep == "late" and self.steps < 3:
                parameter.sub_(parameter.grad, alpha=0.1)
            else:
                state.setdefault("kept", set()).add(self.steps)
                parameter.sub_(parameter.grad, alpha=0.1)


def optimizer(model, keep: str = "set"):
    return Keeps(list(model.parameters()), keep)


experiment = Experiment(name="keeps", global_batch_size=6, micro_batch=2, optimizer=Component(name="optimizer"))
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keeps.py"
    path.write_text(EXPERIMENT)
    return path


@pytest.mark.parametrize(("keep", "logged"), [("set", 0), ("late", 3)])
def test_a_state_that_no_checkpoint_can_hold_is_refused_by_name(
    tmp_path: Path, file: Path, keep: str, logged: int
) -> None:
    """After the first update, and where it comes later by the save, which is due at the end."""
    words = (file, "--set", f"optimizer.keep={keep}", "--log-every", "1", "--device", "cpu")
    ended = ddp("train", *words, "--output", tmp_path)
    assert ended.code == 2, ended.errors
    (line,) = [line for line in ended.errors.splitlines() if line.startswith("ddp: error")]
    assert "your optimizer, Keeps, keeps a state that no checkpoint can hold" in line
    assert "kept'] is a" in line
    assert "Traceback" not in ended.errors
    directory, _ = trained(tmp_path)
    assert directory.metrics.read_text().count('"kind": "step"') == logged


@pytest.mark.slow
def test_a_state_with_numbers_as_keys_is_saved_and_resumed(tmp_path: Path, file: Path) -> None:
    words = (file, "--set", "optimizer.keep=floats", "--checkpoint-every", "1", "--synchronous-save")
    whole = train(tmp_path / "whole", *words)
    killed = ddp("train", *words, "--device", "cpu", "--output", tmp_path / "killed", "--fault", "kill@2")
    assert killed.code == -9
    resumed = train(tmp_path / "killed", *words, "--layout", "dp", "--nproc-per-node", "2", "--resume", "auto")
    for name in ("weights_sha256", "optimizer_sha256"):
        assert resumed[name] == whole[name]


def test_a_state_that_is_another_on_each_rank_and_not_cut_is_refused_by_name(tmp_path: Path, file: Path) -> None:
    words = ("train", file, "--set", "optimizer.keep=chosen", "--device", "cpu", "--output", tmp_path)
    ended = ddp(*words, "--layout", "ddp", "--nproc-per-node", "2", "--shard", "parameters")
    assert ended.code == 2, ended.errors
    assert "Keeps does not treat each element by itself: average of a weight of shape" in ended.errors
    assert "is another on each rank" in ended.errors

"""Weights, gradients and optimizer state by arithmetic, what is said of them, and what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_core.base.errors import ExitCode
from ddp_core.config.experiment import Experiment
from ddp_core.config.layout import Layout, ShardMode
from ddp_core.run import memory
from ddp_core.run.memory import require_room, standing_memory
from ddp_core.sharding import Sharding
from tests.support.commands import ROOT, forked
from tests.support.records import EXPERIMENT
from tests.support.wording import refusing

WEIGHTS = (10 * 20 + 20 + 20 * 5 + 5) * 4
BUFFER = 3 * 4


def model() -> nn.Module:
    layers = nn.Sequential(nn.Linear(10, 20), nn.Sigmoid(), nn.Linear(20, 5))
    layers.register_buffer("mean", torch.zeros(3))
    return layers


def with_optimizer(**fields: Any) -> Experiment:
    return EXPERIMENT.model_copy(
        update={"optimizer": EXPERIMENT.optimizer.model_copy(update=fields), "ema_decay": None}
    )


@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [({"name": "sgd", "momentum": 0.0}, 0), ({"name": "sgd", "momentum": 0.9}, 1), ({"name": "adamw"}, 2)],
)
@pytest.mark.parametrize(
    ("shard", "weights", "gradients"),
    [
        ("none", WEIGHTS, WEIGHTS),
        ("optimizer", WEIGHTS, WEIGHTS // 4),
        ("gradients", WEIGHTS, WEIGHTS // 4),
        ("parameters", WEIGHTS // 4, WEIGHTS // 4),
    ],
)
def test_an_update_needs_what_it_does_by_hand_and_shards_divide_what_they_cut(
    shard: ShardMode, weights: int, gradients: int, optimizer: dict[str, Any], copies: int
) -> None:
    found = standing_memory(model(), with_optimizer(**optimizer), Sharding(shard), 4)
    assert found == {"weights": weights + BUFFER, "gradients": gradients, "optimizer state": copies * gradients}


def test_averaged_weights_are_counted_and_shared_ones_once() -> None:
    layers = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    layers[1].weight = layers[0].weight
    averaged = with_optimizer(name="sgd", momentum=0.0).model_copy(update={"ema_decay": 0.9})
    found = standing_memory(layers, averaged, Sharding(), 1)
    assert found == {"weights": 64, "gradients": 64, "optimizer state": 0, "averaged weights": 64}


def test_what_does_not_fit_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = 3 * WEIGHTS  # gradients and two copies; the weights are there
    ranks, device, experiment = Layout(kind="ddp", nproc_per_node=2), torch.device("cpu"), with_optimizer(name="adam")
    monkeypatch.setattr(memory.psutil, "swap_memory", lambda: type("Swap", (), {"free": 100}))
    monkeypatch.setattr(memory, "free_memory", lambda: 2 * missing - 100)
    require_room(model(), experiment, ranks, device)
    monkeypatch.setattr(memory, "free_memory", lambda: 2 * missing - 101)
    with refusing():
        require_room(model(), experiment, ranks, device)


def test_a_run_that_cannot_fit_ends_before_it_leaves_a_trace(tmp_path: Path) -> None:
    words = ["--layout", "ddp", "--nproc-per-node", "2"]
    small = "\nfrom ddp_core.run import memory\n\nmemory.free_memory = lambda: 100\n"
    small += "memory.psutil.swap_memory = lambda: type('Swap', (), {'free': 0})\n"
    (tmp_path / "mine.py").write_text((ROOT / "experiments" / "toy_mlp.py").read_text() + small)
    with forked("train", tmp_path / "mine.py", "--device", "cpu", "--output", tmp_path, *words) as training:
        ended = training.end()
    assert (ended.code, len(ended.errors.splitlines())) == (ExitCode.RESOURCES, 1), ended
    assert "weights, gradients, optimizer state alone need" in ended.errors
    assert not list(tmp_path.rglob("run.json"))

"""One micro-batch of somebody else's loop is computed again, and weights compared: what differs ends the run.

Tests adapters/micro_steps.py, too.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_core.adapters.micro_steps import MicroSteps
from ddp_core.base.digests import weights_digest
from ddp_core.base.errors import UserError
from tests.support.processes import run_processes

Update = Callable[[nn.Module], None]
MICRO_BATCHES = 6
STEPS = 4


class Net(nn.Module):
    """Draws from all generators, normalises batches, also in evaluation mode, and leaves a parameter without use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.unused, self.dropout = nn.Linear(2, 2), nn.Dropout(0.2)
        self.register_buffer("table", torch.arange(8.0))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.norm(self.dropout(self.first(inputs))) + self.table
        with torch.no_grad():
            pseudo = self.norm.eval()(hidden)
        self.norm.train()
        out: Tensor = self.last(hidden + pseudo) * (1 + random.random() * np.random.rand())
        return out


class OfRank(Net):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * (1 + int(os.environ["RANK"]) * 1e-3)


class Adding(Net):
    """A loss with another constant each time, whose gradient is the same."""

    calls = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        out = super().forward(inputs)
        return out + self.calls * self.added(out)

    def added(self, out: Tensor) -> Tensor:
        return torch.ones(())


class Steeper(Adding):
    """A gradient that is another one each time, of the same loss."""

    def added(self, out: Tensor) -> Tensor:
        return out - out.detach()


def train(model: type[Net], update: Update | None = None) -> tuple[str, dict[str, Tensor]]:
    """Train; what was said in the end, and the weights."""
    network = model()
    steps = MicroSteps(network, MICRO_BATCHES, seed=0, device=torch.device("cpu"))
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

    def run(inputs: Tensor) -> Tensor:
        loss = network(inputs).mean()
        loss.backward()
        return loss

    steps.can_repeat(run)
    try:
        for step in range(STEPS):
            for turn in range(MICRO_BATCHES // ranks):
                number = step * MICRO_BATCHES + turn * ranks + rank
                inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
                steps.begin(inputs)
                with steps.backward(1 / MICRO_BATCHES) as done:
                    done(run(inputs))
            with torch.no_grad():
                for parameter in network.parameters():
                    if parameter.grad is not None:
                        # An optimizer may draw, too.
                        parameter -= 0.1 * parameter.grad + 0.01 * torch.randn_like(parameter) * random.random()
            if update is not None:
                update(network)
        steps.require_same_weights()
        return "", network.state_dict()
    except UserError as error:
        return str(error), {}
    finally:
        steps.close()


def end_of_rank(rank: int, world_size: int, model: type[Net], update: Update | None = None) -> tuple[str, str]:
    dist.init_process_group("gloo")
    try:
        said, weights = train(model, update)
    finally:
        dist.destroy_process_group()
    threads = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    assert "pt_gloo_runloop" not in threads, "somebody holds the process group"
    return said, weights_digest(weights)


def of_rank_1(network: nn.Module) -> None:
    if os.environ["RANK"] == "1":
        with torch.no_grad():
            network.last.bias.add_(1e-6)  # type: ignore[union-attr, operator]


@pytest.mark.parametrize(
    ("model", "what"), [(Adding, "loss"), (Steeper, "gradient of last.bias")], ids=["loss", "gradient"]
)
def test_hidden_state_is_found_on_one_process(model: type[Net], what: str) -> None:
    said, _ = train(model)
    assert said.startswith(f"step 1: micro-batch 1, which rank 0 has computed, has another {what} ")
    assert "when rank 0 of 1 computes it again" in said


@pytest.mark.full
def test_what_depends_on_the_rank_is_found_on_all_ranks() -> None:
    said = {words for words, _ in run_processes(end_of_rank, 2, OfRank)}
    assert len(said) == 1
    assert "which rank 1 has computed, has another loss when rank 0 of 2 computes it again" in said.pop()


def test_weights_that_one_rank_changes_are_found_after_the_first_update() -> None:
    ends: list[Any] = run_processes(end_of_rank, 3, Net, of_rank_1)
    assert all(
        "after step 1 of this start last.bias is not the same on all ranks (differs: 1 of 3)" in words
        for words, _ in ends
    )

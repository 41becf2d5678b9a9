"""Replicas that are threads: the bits of one process, and batches that are cut among them and joined."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_core.config.layout import Layout
from ddp_core.model.losses import cross_entropy
from ddp_core.trainers.data_parallel import _joined
from ddp_core.trainers.passes import InPrecision, Passes
from tests.core.trainers import builders
from tests.support.wording import refusing


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("last_batch", ["drop", "keep"])
def test_threads_end_with_the_bits_of_one_process(count: int, last_batch: str) -> None:
    record = builders.experiment(reduction="exact", epochs=2, last_batch=last_batch, **builders.RECIPES["adamw"])
    # 70 = 4 * 16 + 6: a kept last batch has micro-batches of 4 and 2 samples, so a third and fourth replica stay idle.
    details: dict[str, Any] = {"train": builders.samples(70)}
    alone = builders.finished(record, builders.batch_norm_and_dropout, **details)
    together = builders.finished(
        record, builders.batch_norm_and_dropout, Layout(kind="dp", nproc_per_node=count), **details
    )
    assert builders.digests(together) == builders.digests(alone)


class Recomputing(nn.Module):
    """Computes its first layers again in backward, with dropout among them or not."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(builders.FEATURES, 16), nn.Dropout(dropout), nn.Tanh())
        self.last = nn.Linear(16, builders.CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(checkpoint(self.first, rows, use_reentrant=False))


@pytest.mark.parametrize("dropout", [0, 0.3])
def test_replicas_in_threads_draw_the_same_again_where_backward_computes_again(dropout: float) -> None:
    """With other draws the second computation would drop other units, and gradients would be wrong without a word."""
    record, dp = builders.experiment(reduction="exact", epochs=1), Layout(kind="dp", nproc_per_node=2)
    alone = builders.finished(record, lambda: Recomputing(dropout))
    assert builders.digests(builders.finished(record, lambda: Recomputing(dropout), dp)) == builders.digests(alone)


def test_a_thread_of_nn_data_parallel_keeps_the_precision() -> None:
    """torch's threads take over that autocast is on, and not its dtype (torch/nn/parallel/parallel_apply.py)."""
    passes = Passes(builders.experiment(precision="fp16"), cross_entropy, builders.CPU)
    found = {}

    def apply(module: nn.Module) -> None:
        with torch.amp.autocast("cpu", enabled=True), torch.no_grad():
            found[type(module)] = module(torch.ones(2, builders.FEATURES)).dtype

    linear = nn.Linear(builders.FEATURES, builders.CLASSES)
    for module in (linear, InPrecision(linear, passes)):
        with passes.autocast():
            thread = threading.Thread(target=apply, args=(module,))
            thread.start()
            thread.join()
    assert found == {nn.Linear: torch.bfloat16, InPrecision: torch.float16}


def test_a_round_of_data_parallel_is_joined_at_every_place_of_the_tree() -> None:
    whole = {"x": torch.arange(10.0).view(5, 2)}, [torch.arange(5)]
    parts = [({"x": whole[0]["x"][rows]}, [whole[1][0][rows]]) for rows in (slice(0, 3), slice(3, 5))]
    inputs, targets = _joined(parts, [3, 2])
    assert torch.equal(inputs["x"], whole[0]["x"])
    assert torch.equal(targets[0], whole[1][0])


@pytest.mark.parametrize("other", [torch.ones(2, 4), torch.ones(7)])
def test_what_data_parallel_cannot_cut_is_refused(other: Tensor) -> None:
    with refusing():
        _joined([(torch.ones(3, 2), torch.ones(3)), (other, torch.ones(2))], [3, 2])

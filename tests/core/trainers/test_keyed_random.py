"""Replicas that are threads draw from generators of their own, by key."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ddp_core.base.seeds import MicroBatchSeed
from ddp_core.trainers.data_parallel import KeyedRandom

CPU = torch.device("cpu")
DRAWS: dict[str, Callable[[], Tensor]] = {
    "dropout": lambda: functional.dropout(torch.ones(50), 0.4),
    "alpha dropout": lambda: functional.alpha_dropout(torch.ones(50), 0.3, training=True),
    "randn": lambda: torch.randn(9),
    "randperm": lambda: torch.randperm(20),
    "bernoulli_": lambda: torch.zeros(50).bernoulli_(0.5),
    "multinomial": lambda: torch.multinomial(torch.ones(10), 5),
    "rrelu": lambda: functional.rrelu(-torch.ones(9), training=True),
    "attention": lambda: functional.scaled_dot_product_attention(*[torch.ones(1, 1, 4, 8)] * 3, dropout_p=0.5),
}


@pytest.mark.parametrize("name", DRAWS)
def test_replicas_in_threads_draw_what_one_process_draws(name: str) -> None:
    draw = DRAWS[name]
    MicroBatchSeed(7, CPU)(3, 1)
    expected = draw()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with KeyedRandom(7, CPU).micro_batch(3, 1):
        found = draw()
    assert torch.equal(found, expected)
    assert torch.equal(torch.get_rng_state(), before), "the shared generator was touched"


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_backward_that_draws_later_is_keyed_too(use_reentrant: bool) -> None:
    random, drop, found = KeyedRandom(1, CPU), nn.Dropout(0.5), []

    def dropped(weight: Tensor) -> Tensor:
        other = threading.Thread(target=torch.rand, args=(3,))  # another replica's draw from the shared generator
        other.start()
        other.join()
        return drop(weight) * weight

    weight = torch.ones(64, requires_grad=True)
    with random.micro_batch(0, 0):
        loss = weight.sum()
    with random.backward():
        loss.backward()
    for function in (lambda weight: checkpoint(dropped, weight, use_reentrant=use_reentrant), dropped):
        with random.micro_batch(0, 1):
            loss = function(weight).sum()
        weight.grad = None
        with random.backward():
            loss.backward()
        found.append(weight.grad)
    assert torch.equal(*found)

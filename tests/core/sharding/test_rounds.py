"""Strided shares in which each rank adds up its own part: a slow network does not pile up gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ddp_core.reduction.flat import Gradients
from ddp_core.reduction.parts import parts_on
from ddp_core.sharding.parcels import GroupParcel
from ddp_core.sharding.rounds import Rounds
from ddp_core.sharding.shards import Shards
from tests.support.thread_group import at_once

UNDER_WAY = 3


class Slow:
    """A channel on which nothing arrives before somebody waits for it."""

    device = torch.device("cpu")
    by_parts = parts_on(None, (), device)

    def __init__(self) -> None:
        self.under_way = self.most = 0

    def submit(self, transfer: Any, like: Tensor) -> Any:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        return SimpleNamespace(wait=lambda: self.arrive(transfer))

    def arrive(self, transfer: Any) -> Tensor:
        self.under_way -= 1
        arrived: Tensor = at_once(transfer)
        return arrived


def test_no_more_parcels_are_on_their_way_than_are_allowed_and_no_gradient_outlives_its_step() -> None:
    # Of four dtypes, so that each weight is a parcel of its own.
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    weights = nn.ParameterList(nn.Parameter(torch.ones(8, dtype=dtype)) for dtype in dtypes)
    gradients, channel = Gradients(weights.named_parameters()), Slow()
    made: list[StorageWeakRef] = []
    for weight in weights:
        weight.register_post_accumulate_grad_hook(lambda each: made.append(StorageWeakRef(each.grad.untyped_storage())))
    shards = Shards(gradients.parameters, range(1))
    owned = shards.owned(0, gradients.names)
    rounds = Rounds(
        [GroupParcel(group, owned, 0, gradients) for group in reversed(shards.groups)],
        owned,
        gradients,
        channel,  # type: ignore[arg-type]
        None,
        UNDER_WAY,
    )
    rounds.begin(3)
    with rounds.backward(0):
        sum(weight.sum() for weight in weights).backward()
        assert channel.most == UNDER_WAY
    assert channel.under_way == UNDER_WAY
    rounds.begin(2)
    assert channel.under_way == 0, "the step that was given up has left nothing on its way"
    assert all(memory.expired() for memory in made)

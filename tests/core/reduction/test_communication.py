"""Messages of which one may overtake another, and how long the reduction waits for a silent rank."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_core.base.torch_internals import timeout_of
from ddp_core.reduction.communication import own_group
from ddp_core.reduction.messages import PointToPoint
from tests.support.processes import ask

CPU = torch.device("cpu")
LATE, SUM = 2.0, 9.0


class SlowSender:
    """Rank 0's side of a group of two: what it sends leaves when it is waited for; what comes, comes at once."""

    def __init__(self) -> None:
        self.sent: list[list[float]] = []

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return SimpleNamespace(wait=lambda: self.sent.append(tensors[0].tolist()))

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        tensors[0].fill_(SUM)
        return SimpleNamespace(wait=lambda: None)


def test_a_sum_that_comes_early_does_not_overwrite_what_is_still_to_be_sent() -> None:
    group: Any = SlowSender()
    flat = torch.full((4,), LATE)
    # As with a bucket of DDP: the sums arrive where the own tensor lies.
    collected = PointToPoint(group).collect([flat], flat, [1, 1], [slice(0, 2), slice(2, 4)])
    collected.expect_sums()
    collected.end()
    assert group.sent == [[LATE, LATE]]
    assert flat.tolist() == [LATE, LATE, SUM, SUM]


def timeouts() -> list[timedelta]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=7))
    whole = dist.group.WORLD
    assert whole is not None
    return [timeout_of(own_group(whole, CPU, timeout), CPU) for timeout in (None, timedelta(seconds=3))]


def test_the_reduction_waits_as_long_as_the_rest_of_the_program_or_as_it_is_told() -> None:
    assert ask(timeouts) == [timedelta(seconds=7), timedelta(seconds=3)]

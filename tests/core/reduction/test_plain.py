"""The plain reduction: a gradient that is missing, and how often ranks send; tests of layouts have its numbers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ddp_core.distributed.process_group import process_group
from ddp_core.distributed.world import World
from ddp_core.reduction.plain import PlainReduction
from tests.support.processes import run_processes


def test_a_parameter_without_a_gradient_has_none_afterwards() -> None:
    module = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    reduction = PlainReduction(module, 1)
    reduction.begin(1)
    with reduction.micro_batch(0):
        module[0](torch.ones(1, 2)).sum().backward()
    reduction.finish()
    assert module[0].weight.grad.tolist() == [[1.0, 1.0]]
    assert module[1].weight.grad is None


def _sends(rank: int, world_size: int) -> int:
    """How often DDP has sent the gradients of four micro-batches."""
    sent = []

    def count(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        sent.append(bucket.index())
        return default_hooks.allreduce_hook(group, bucket)

    # DDP compares the annotations with classes, not with the strings that `from __future__ import annotations` leaves.
    count.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
    with process_group(World.from_environment(), torch.device("cpu"), 30):
        module = DistributedDataParallel(nn.Linear(5, 4))
        module.register_comm_hook(dist.group.WORLD, count)
        reduction = PlainReduction(module, 4)
        reduction.begin(4)
        for index in reduction.share:
            with reduction.micro_batch(index):
                module(torch.ones(3, 5)).sum().backward()
        reduction.finish()
        reduction.close()
    return len(sent)


def test_ranks_send_once_a_step() -> None:
    assert run_processes(_sends, 2) == [1, 1]

"""The plain reduction has the interface of the exact reduction, and its gradients up to rounding."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ddp_core.distributed.process_group import process_group
from ddp_core.distributed.world import World
from ddp_core.reduction import ExactReduction
from ddp_core.reduction.plain import PlainReduction
from tests.support.processes import run_processes

MICRO_BATCHES, SAMPLES = 4, 3


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))


def gradients(
    reduction: ExactReduction | PlainReduction, module: nn.Module, scale: float, loss_weight: float = 1.0
) -> list[Tensor]:
    """The gradients of the sum of all squared outputs, over this rank's micro-batches, reduced over the ranks."""
    inputs = torch.randn(MICRO_BATCHES, SAMPLES, 5, generator=torch.Generator().manual_seed(1))
    reduction.begin(MICRO_BATCHES)
    for index in reduction.share:
        with reduction.micro_batch(index):
            (module(inputs[index]).square().sum() * loss_weight).backward()
    reduction.finish(scale)
    found = [parameter.grad for parameter in module.parameters()]
    reduction.close()
    return [gradient for gradient in found if gradient is not None]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) == 4 and all(map(torch.allclose, ours, theirs))


def test_a_parameter_without_a_gradient_has_none_afterwards() -> None:
    module = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])
    reduction = PlainReduction(module, 1)
    reduction.begin(1)
    with reduction.micro_batch(0):
        module[0](torch.ones(1, 2)).sum().backward()
    reduction.finish(scale=0.5)
    assert module[0].weight.grad.tolist() == [[0.5, 0.5]]
    assert module[1].weight.grad is None


def _on_two_ranks(rank: int, world_size: int) -> tuple[bool, int]:
    """Whether the gradients are those of one process, and how often DDP has sent them."""
    sent = []

    def count(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        sent.append(bucket.index())
        return default_hooks.allreduce_hook(group, bucket)

    # DDP compares the annotations with classes, not with the strings that `from __future__ import annotations` leaves.
    count.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
    with process_group(World.from_environment(), torch.device("cpu"), 30):
        plain = model()
        expected = copy.deepcopy(plain)
        wrapped = DistributedDataParallel(plain)
        wrapped.register_comm_hook(dist.group.WORLD, count)
        # DDP divides by the number of ranks.
        found = gradients(PlainReduction(wrapped, MICRO_BATCHES), wrapped, 0.04, loss_weight=world_size)
        return same(found, gradients(ExactReduction(expected, MICRO_BATCHES), expected, 0.04)), len(sent)


def test_the_scale_means_the_same_on_two_ranks_which_send_once() -> None:
    assert run_processes(_on_two_ranks, 2) == [(True, 1), (True, 1)]

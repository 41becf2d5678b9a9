"""The network of the tutorials in a loop without any adapter: what the adapters' digests are compared with."""

from __future__ import annotations

import functools

import torch
from torch import nn

from ddp_core.base.digests import weights_digest
from ddp_core.base.seeds import MicroBatchSeed
from ddp_core.reduction import ExactReduction
from ddp_core.sampler import GlobalOrder
from tests.support.processes import ask


@functools.cache
def plain_digest() -> str:
    """The digest after three epochs of ten steps of six micro-batches of 16 samples, in one process."""
    digest: str = ask(_train)
    return digest


def _train() -> str:
    torch.manual_seed(0)
    inputs = torch.randn(1000, 8)
    targets = inputs[:, :3].argmax(1)
    network = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
    order, seed = GlobalOrder(1000, seed=0), MicroBatchSeed(0, torch.device("cpu"))
    with ExactReduction(network, micro_batches=6) as exact:
        for step in range(30):
            epoch, step_of_epoch = divmod(step, 10)
            for index in exact.share:
                start = (step_of_epoch * 6 + index) * 16
                ids = torch.from_numpy(order.ids(epoch, start, start + 16))
                with exact.micro_batch(index):
                    seed(step, index)
                    nn.functional.cross_entropy(network(inputs[ids]), targets[ids]).backward()
            exact.finish(scale=1 / 6)
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return weights_digest(network.state_dict())

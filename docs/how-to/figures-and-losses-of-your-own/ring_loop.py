"""Trains a generator to draw points on a ring against a critic, on as many ranks as torchrun starts."""

import hashlib
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a process group, so that the last line can end it
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

from ddp_core import Checkpointer, ElasticSampler, ExactReduction, MicroBatches, load
from ddp_core.checkpoint import newest_valid

EPOCHS, NOISE, PENALTY = 4, 4, 1.0
CHECKPOINTS = Path("checkpoints")
STOP_AT = int(sys.argv[1]) if len(sys.argv) > 1 else None  # a step, to try how the script continues


def ring(size: int) -> TensorDataset:
    angle = 2 * math.pi * torch.rand(size, generator=torch.Generator().manual_seed(0))
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], dim=1))


def slope_penalty(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    share = torch.rand(len(real), 1)
    between = (share * real + (1 - share) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty: Tensor = (slope.norm(dim=1) - 1).square().sum()
    return penalty


def train(rank: int) -> None:
    torch.manual_seed(0)
    dataset = ring(500)
    generator = nn.Sequential(nn.Linear(NOISE, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(32, 1))
    gan = nn.ModuleDict({"generator": generator, "critic": critic})
    optimizers = {name: torch.optim.Adam(part.parameters(), lr=2e-3, betas=(0.5, 0.9)) for name, part in gan.items()}
    exact = ExactReduction(gan, micro_batches=6, process_group=dist.group.WORLD)
    sampler = ElasticSampler(dataset)
    batches = MicroBatches(dataset, sampler, exact, micro_batch=8)

    number = 0
    if newest := newest_valid(CHECKPOINTS):
        state = load(newest)
        number = state["step"]
        gan.load_state_dict(state["gan"])
        sampler.load_state_dict(state["sampler"])
        for name, optimizer in optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])

    for epoch in range(sampler.epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for step in batches:
            parts = []
            for index, (real,) in step:  # first the critic, on real and drawn points
                parts.append((index, (real,)))
                with exact.micro_batch(index):
                    with torch.no_grad():
                        fake = generator(torch.randn(len(real), NOISE))
                    loss = softplus(-critic(real)).sum() + softplus(critic(fake)).sum()
                    (loss + PENALTY * slope_penalty(critic, real, fake)).backward()
            exact.finish(scale=1 / step.samples)
            optimizers["critic"].step()
            for index, (real,) in step.again(parts):  # then the generator, against the critic as it is now
                with exact.micro_batch(index):
                    judged = critic(generator(torch.randn(len(real), NOISE)))
                    softplus(-judged).sum().backward(inputs=list(generator.parameters()))
            exact.finish(scale=1 / step.samples)
            optimizers["generator"].step()
            number += 1
            if rank == 0 and number % 5 == 0:
                state = {"gan": gan.state_dict(), "sampler": sampler.state_dict(), "step": number}
                state["optimizers"] = {name: optimizer.state_dict() for name, optimizer in optimizers.items()}
                Checkpointer(CHECKPOINTS).save(state, step=number, epoch=epoch)
            if number == STOP_AT:
                return

    if rank == 0:
        weights = b"".join(tensor.numpy().tobytes() for tensor in gan.state_dict().values())
        print(f"{number} steps, weights {hashlib.sha256(weights).hexdigest()[:16]}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(dist.get_rank())
    dist.destroy_process_group()

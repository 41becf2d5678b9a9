"""A parameter server: one process holds the weights, workers send it gradients, synchronously or asynchronously.

Synchronous: the server waits for a gradient of every worker, averages them, makes one update and answers all.
Asynchronous: it applies each gradient on arrival, with its worker's share of the rate, and answers that worker alone.
Source: Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012 (Downpour SGD).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ddp_core.data.builders import digits
from ddp_core.data.loader import Loader
from ddp_core.model.builders import small_cnn
from ddp_core.sampler import GlobalOrder

DIVERGED = 1e6
"""Stands for a loss that is not a number, or larger than this."""

_FACTS = 5


@dataclass(frozen=True)
class Work:
    """One run of the server: how it updates, how long, and how much slower than the others the last worker is."""

    asynchronous: bool
    seed: int
    gradients: int
    slow_seconds: float
    batch: int
    rate: float
    width: int


def serve_and_work(rank: int, world_size: int, works: list[Work]) -> list[dict[str, Any]]:
    """Run after run, rank 0 serves and the others compute gradients; rank 0 returns what it saw of each run."""
    found = []
    for work in works:
        model = network(work.seed, work.width)
        dist.all_reduce(torch.zeros(1))  # the processes set out together
        if rank == 0:
            found.append(_serve(model, world_size, work))
        else:
            _compute(model, rank, world_size, work)
    return found


def _serve(model: nn.Module, world_size: int, work: Work) -> dict[str, Any]:
    """Hold the weights and answer each gradient with new weights, until enough gradients were used.

    A worker sends [gradient, loss, version of the weights it was taken at, gradients sent, seconds waited in all,
    seconds in all]. It gets [weights, version]; version -1 is the end.
    """
    workers = world_size - 1
    weights, version = flat_weights(model), 0
    size = len(weights)
    losses: list[float] = []
    staleness: list[float] = []
    clocks: dict[int, list[float]] = {}
    began = time.perf_counter()
    message = torch.zeros(size + _FACTS)
    while len(losses) < work.gradients:
        group = []
        for turn in range(1 if work.asynchronous else workers):
            sender = dist.recv(message, src=None if work.asynchronous else turn + 1)
            loss, taken_at, *clocks[sender] = message[size:].tolist()
            losses.append(bounded(loss))
            staleness.append(version - taken_at)
            group.append((sender, message[:size].clone()))
        mean = torch.stack([gradient for _, gradient in group]).mean(0)
        weights = weights - work.rate / (workers if work.asynchronous else 1) * mean
        version += 1
        if len(losses) < work.gradients:
            for sender, _ in group:
                dist.send(torch.cat([weights, torch.tensor([float(version)])]), sender)
    seconds = time.perf_counter() - began
    answered = {sender for sender, _ in group}
    for sender in range(1, world_size):
        if sender not in answered:
            dist.recv(message, src=sender)
            # Where few gradients are asked for, the others may have sent all of them.
            clocks.setdefault(sender, message[size + 2 :].tolist())
    for number in range(1, world_size):
        dist.send(torch.cat([weights, torch.tensor([-1.0])]), number)
    fast = [clocks[number] for number in range(1, workers)]
    return {
        "losses": losses,
        "staleness": sum(staleness) / len(staleness),
        "gradients_per_second": len(losses) / seconds,
        "wait_seconds": sum(waited / sent for sent, waited, _ in fast) / len(fast),
        "wait_percent": 100 * sum(waited / lasted for _, waited, lasted in fast) / len(fast),
    }


def _compute(model: nn.Module, rank: int, world_size: int, work: Work) -> None:
    """Send gradients until the server says that it is enough. The clocks start with the first answer."""
    source, workers = Source(work.seed, work.batch), world_size - 1
    weights, version, step = flat_weights(model), 0.0, 0
    waited, began = 0.0, time.perf_counter()
    message = torch.zeros(len(weights) + 1)
    while version >= 0:
        gradient, loss = gradient_at(model, weights, *source.batch(step * workers + rank - 1))
        if rank == workers:
            time.sleep(work.slow_seconds)
        lasted = time.perf_counter() - began
        facts = torch.tensor([loss, version, float(max(1, step - 1)), waited, lasted])
        dist.send(torch.cat([gradient, facts]), 0)
        before = time.perf_counter()
        dist.recv(message, src=0)
        after = time.perf_counter()
        waited, began = (waited + after - before, began) if step else (0.0, after)
        weights, version, step = message[:-1].clone(), float(message[-1]), step + 1


def work_alone(rank: int, world_size: int, works: list[Work], workers: int) -> list[list[float]]:
    """The losses of one process, without a server, that trains on the batches of a synchronous server's workers."""
    found = []
    for work in works:
        model, source = network(work.seed, work.width), Source(work.seed, work.batch)
        weights, losses = flat_weights(model), []
        for step in range(-(-work.gradients // workers)):
            batches = [source.batch(step * workers + number) for number in range(workers)]
            gradients = []
            for inputs, targets in batches:
                gradient, loss = gradient_at(model, weights, inputs, targets)
                gradients.append(gradient)
                losses.append(bounded(loss))
            weights = weights - work.rate * torch.stack(gradients).mean(0)
        found.append(losses)
    return found


class Source:
    """Batches of digits by step."""

    def __init__(self, seed: int, size: int) -> None:
        splits = digits()
        self.loader, self.order = Loader(splits.train, splits.augmentation, seed), GlobalOrder(len(splits.train), seed)
        self.size, self.steps = size, len(splits.train) // size

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step, counted through all epochs."""
        epoch, position = divmod(step, self.steps)
        return self.loader.fetch(epoch, self.order.ids(epoch, position * self.size, (position + 1) * self.size))


def network(seed: int, width: int) -> nn.Module:
    """A small network whose initial weights follow from the seed."""
    torch.manual_seed(seed)
    return small_cnn(width=width, dropout=0.0)


def flat_weights(model: nn.Module) -> Tensor:
    """A copy of all parameters in one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def gradient_at(model: nn.Module, weights: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    """The gradient at these weights in one vector, and the loss."""
    set_weights(model, weights)
    model.zero_grad()
    loss = functional.cross_entropy(model(inputs), targets)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat([gradient.flatten() for gradient in gradients]), float(loss.detach())


@torch.no_grad()
def set_weights(model: nn.Module, weights: Tensor) -> None:
    """Give the model the parameters of a vector."""
    start = 0
    for parameter in model.parameters():
        parameter.copy_(weights[start : start + parameter.numel()].view_as(parameter))
        start += parameter.numel()


def bounded(loss: float) -> float:
    """The loss, or DIVERGED."""
    return min(loss, DIVERGED) if loss == loss else DIVERGED

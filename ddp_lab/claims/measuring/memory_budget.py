"""Training in processes whose memory is limited by the kernel: whole, as replicas, or cut in two halves.

The device here is a process: `setrlimit(RLIMIT_DATA)` bounds the private writable memory of each, and an allocation
beyond the bound fails as it does on a full device. The bound is set when torch is loaded and the process group is
there, so it counts what the training itself takes.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ddp_core.base.errors import UserError, first_line
from ddp_lab.claims.measuring.ranks import run_ranks

M_MMAP_THRESHOLD = -3
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "MemoryError", "bad_alloc", "Cannot allocate memory")


def train_within(
    way: str, processes: int, layers: int, budget_mib: int | None, width: int, steps: int, rate: float
) -> Any:
    """Train so many layers in such a way: `{"trained": whether, "losses": by step, "said": why not, ...}`.

    Trained means that no process failed and that the loss is no higher at the end than at the start.

    `whole`: each process has all layers; several of them are replicas under torch's DDP. `halves`: the first of two
    processes has the first half of the layers and the second the rest; they send activations and gradients to each
    other. `sharded`: each process has a part of each layer, and all of a layer while that computes (FSDP2). `probe`:
    takes twice the budget, to see whether the limit holds at all.
    """
    try:
        found = run_ranks(_train, processes, way, layers, budget_mib, width, steps, rate, timeout=600)
    except UserError as error:
        found = [{"trained": False, "losses": [], "said": str(error)}]
    said = [rank["said"] for rank in found if rank["said"]]
    return {
        "trained": all(rank["trained"] for rank in found) and found[-1]["losses"][-1] <= found[-1]["losses"][0],
        "losses": found[-1]["losses"],
        "out_of_memory": any(word in line for line in said for word in _OUT_OF_MEMORY),
        "said": "; ".join(dict.fromkeys(said)),
    }


def _train(
    rank: int, world_size: int, way: str, layers: int, budget: int | None, width: int, steps: int, rate: float
) -> Any:
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024)  # freed memory goes back at once
    ways: dict[str, Callable[..., list[float]]] = {
        "whole": _whole,
        "halves": _halves,
        "sharded": _sharded,
        "probe": _probe,
    }
    for first in ("sharded", "whole"):
        ways[first](rank, world_size, 1, 16, 1, rate)  # loads libraries and starts threads
    try:
        with _limit(budget):
            losses = ways[way](rank, world_size, layers, width, steps, rate)
    except (RuntimeError, MemoryError) as error:
        return {"trained": False, "losses": [], "said": f"{type(error).__name__}: {first_line(error)}"}
    return {"trained": True, "losses": losses, "said": ""}


def process_status(name: str) -> int:
    """The bytes that Linux tells of this process under a name such as VmRSS (proc(5))."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kibibytes,) = [line.split()[1] for line in lines if line.startswith(f"{name}:")]
    return int(kibibytes) * 1024


@contextmanager
def _limit(budget: int | None) -> Iterator[None]:
    """Allow this process so many MiB more than it has now."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    if budget is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (process_status("VmData") + budget * 2**20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _probe(rank: int, world_size: int, layers: int, width: int, steps: int, rate: float) -> list[float]:
    return [float(torch.ones(layers * 2**18).sum())]  # `layers` MiB


def _whole(rank: int, world_size: int, layers: int, width: int, steps: int, rate: float) -> list[float]:
    """All layers in this process; where there are several processes, as a replica under DDP."""
    model = _layers(range(layers), width)
    module = DistributedDataParallel(model) if world_size > 1 else model
    return _steps(module, rank, world_size, width, steps, rate)


def _sharded(rank: int, world_size: int, layers: int, width: int, steps: int, rate: float) -> list[float]:
    """All layers, each of them cut among the processes; each layer is cut before the next one is made."""
    mesh, model = init_device_mesh("cpu", (world_size,)), nn.Sequential()
    for number in range(layers):
        for module in _layers(range(number, number + 1), width):
            if isinstance(module, nn.Linear):
                fully_shard(module, mesh=mesh)
            model.append(module)
    fully_shard(model, mesh=mesh)
    return _steps(model, rank, world_size, width, steps, rate)


def _steps(module: nn.Module, rank: int, world_size: int, width: int, steps: int, rate: float) -> list[float]:
    """Train with this rank's share of the samples; returns the loss over all of them, by step."""
    inputs, targets = (data.chunk(world_size)[rank] for data in _data(width))
    optimizer = torch.optim.SGD(module.parameters(), lr=rate, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(module(inputs), targets)
        loss.backward()
        optimizer.step()
        whole = loss.detach() / world_size
        if world_size > 1:
            dist.all_reduce(whole)
        losses.append(float(whole))
    return losses


def _halves(rank: int, world_size: int, layers: int, width: int, steps: int, rate: float) -> list[float]:
    """Half of the layers in this process: activations go to the second process, their gradients come back."""
    half = layers // 2
    model = _layers(range(half) if rank == 0 else range(half, layers), width)
    inputs, targets = _data(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            outputs = model(inputs)
            dist.send(outputs.detach(), 1)
            gradient = torch.empty_like(outputs)
            dist.recv(gradient, 1)
            outputs.backward(gradient)
        else:
            received = torch.empty_like(inputs)
            dist.recv(received, 0)
            received.requires_grad_()
            loss = functional.cross_entropy(model(received), targets)
            loss.backward()
            assert received.grad is not None
            dist.send(received.grad, 0)
            losses.append(float(loss.detach()))
        optimizer.step()
    return losses


def _layers(numbers: range, width: int) -> nn.Sequential:
    """Linear layers, each with the initial weights of its number, wherever it is."""
    found: list[nn.Module] = []
    for number in numbers:
        torch.manual_seed(number)
        layer = nn.Linear(width, width, bias=False)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        found += [nn.ReLU(), layer] if number else [layer]
    return nn.Sequential(*found)


def _data(width: int) -> tuple[Tensor, Tensor]:
    """Sixteen samples, each of a class of its own."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(16, width, generator=generator), torch.arange(16)

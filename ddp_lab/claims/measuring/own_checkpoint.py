"""The sources' own way to resume, torch alone: rank 0 saves after each epoch, a new start loads the latest file."""

from __future__ import annotations

import hashlib
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_core.base.errors import UserError
from ddp_lab.claims.measuring.ranks import run_ranks

WEIGHTS, ALL = "weights", "weights and optimizer"
WAYS = (WEIGHTS, ALL)
"""What is saved: the weights, as the sources say, or the optimizer's state, too."""
_SAMPLES, _BATCH = 256, 16


def kill_and_resume(epochs: int, killed_after: int) -> list[dict[str, Any]]:
    """By way of saving: a run of two ranks of which one dies after so many steps, and the run that is started then.

    `newest` is the epoch of the latest file before the new start, `resumed_at` the one that it loaded, `first_loss` and
    `resumed_loss` the losses of the first step from the start and after resuming; `weights_sha256` and `undisturbed`
    are digests of the final weights, of this run and of one that nobody killed.
    """
    (whole, _) = run_ranks(train, 2, "", WEIGHTS, epochs, 0)
    found = []
    for way in WAYS:
        with tempfile.TemporaryDirectory(prefix="ddp-claim-") as folder:
            try:
                run_ranks(train, 2, folder, way, epochs, killed_after)
                killed = False
            except UserError:
                killed = True
            newest = max((int(path.stem) for path in Path(folder).glob("*.pt")), default=None)
            (again, _) = run_ranks(train, 2, folder, way, epochs, 0)
        case = {"way": way, "killed_after": killed_after, "killed": killed, "newest": newest}
        case |= {"resumed_at": again["resumed_at"], "resumed_loss": again["loss"], "first_loss": whole["loss"]}
        found.append(case | {"weights_sha256": again["digest"], "undisturbed": whole["digest"]})
    return found


def train(rank: int, world_size: int, folder: str, way: str, epochs: int, killed_after: int) -> dict[str, Any]:
    """Train from the latest file in the folder on; rank 1 kills itself after so many steps, 0 for never."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    latest = max(Path(folder).glob("*.pt"), key=lambda path: int(path.stem), default=None) if folder else None
    start = 0
    if latest is not None:
        saved = torch.load(latest, weights_only=True)
        model.load_state_dict(saved["model"])
        if way == ALL:
            optimizer.load_state_dict(saved["optimizer"])
        start = int(latest.stem)
    module = DistributedDataParallel(model)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(_SAMPLES, 10, generator=generator)
    pairs = TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
    sampler: DistributedSampler[Any] = DistributedSampler(pairs)
    losses: list[float] = []
    for epoch in range(start, epochs):
        sampler.set_epoch(epoch)
        for some_inputs, targets in DataLoader(pairs, batch_size=_BATCH, sampler=sampler):
            optimizer.zero_grad()
            loss = functional.mse_loss(module(some_inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if rank == 1 and len(losses) == killed_after:
                os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0 and folder:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, Path(folder, f"{epoch + 1}.pt")
            )
        dist.barrier()
    digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()
    return {"resumed_at": start, "loss": losses[0], "digest": digest}

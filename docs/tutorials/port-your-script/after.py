"""Trains a small model on scikit-learn's digits, on as many ranks as torchrun starts."""

import hashlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a process group, so that the last line can end it
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from ddp_core import Checkpointer, ElasticSampler, ExactReduction, MicroBatches, load
from ddp_core.checkpoint import newest_valid

EPOCHS = 3
CHECKPOINTS = Path("checkpoints")
STOP_AT = int(sys.argv[1]) if len(sys.argv) > 1 else None  # a step, to try how the script continues


def train(rank: int) -> None:
    torch.manual_seed(0)
    pixels, digits = load_digits(return_X_y=True)
    samples = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
    dataset = TensorDataset(*(column[:1500] for column in samples))
    sampler = ElasticSampler(dataset)
    model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    exact = ExactReduction(model, micro_batches=6, process_group=dist.group.WORLD)
    loader = MicroBatches(dataset, sampler, exact, micro_batch=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    step, first_epoch = 0, 0
    state = load(newest) if (newest := newest_valid(CHECKPOINTS)) else None
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, first_epoch = state["step"], state["epoch"]
        sampler.load_state_dict(state["sampler"])

    for epoch in range(first_epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            for index, (images, targets) in batch:
                with exact.micro_batch(index):
                    cross_entropy(model(images), targets, reduction="sum").backward()
            exact.finish(scale=1 / batch.samples)
            optimizer.step()
            step += 1
            if rank == 0 and step % 10 == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                state |= {"step": step, "epoch": epoch, "sampler": sampler.state_dict()}
                Checkpointer(CHECKPOINTS).save(state, step=step, epoch=epoch)
            if step == STOP_AT:
                return

    if rank == 0:
        model.eval()
        right = sum((model(x).argmax(1) == y).sum().item() for x, y in DataLoader(TensorDataset(*samples), 99))
        weights = b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())
        print(f"{step} steps, {right} of 1797 right, weights {hashlib.sha256(weights).hexdigest()[:16]}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(dist.get_rank())
    dist.destroy_process_group()

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
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 3
CHECKPOINTS = Path("checkpoints")
STOP_AT = int(sys.argv[1]) if len(sys.argv) > 1 else None  # a step, to try how the script continues


def train(rank: int) -> None:
    torch.manual_seed(0)
    pixels, digits = load_digits(return_X_y=True)
    samples = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(digits)
    dataset = TensorDataset(*(column[:1500] for column in samples))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=48, sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    CHECKPOINTS.mkdir(exist_ok=True)
    step, first_epoch = 0, 0
    state = torch.load(CHECKPOINTS / "last.pt") if (CHECKPOINTS / "last.pt").exists() else None
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, first_epoch = state["step"], state["epoch"]

    for epoch in range(first_epoch, EPOCHS):
        sampler.set_epoch(epoch)
        for images, targets in loader:
            optimizer.zero_grad()
            cross_entropy(ddp(images), targets).backward()
            optimizer.step()
            step += 1
            if rank == 0 and step % 10 == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                state |= {"step": step, "epoch": epoch}
                torch.save(state, CHECKPOINTS / "last.pt")
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

"""After pytorch/examples, imagenet/main.py: spawns its ranks, flips pictures at random, all-reduces its meters.

As there: DistributedSampler for both data sets, set_epoch, SGD with momentum, StepLR, an evaluation of each share that
is put together, and the rest that the samplers would have padded, evaluated by each rank. Cut: 48 pictures of 16 x 16
that `--dummy` makes, no GPU.
"""

import argparse
import random

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision import datasets, models, transforms


class AverageMeter:
    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value, count):
        self.total += value * count
        self.count += count

    def all_reduce(self):
        both = torch.tensor([self.total, self.count], dtype=torch.float32)
        dist.all_reduce(both, dist.ReduceOp.SUM)
        self.total, self.count = both.tolist()


def main_worker(rank, arguments):
    random.seed(arguments.seed)
    torch.manual_seed(arguments.seed)
    dist.init_process_group("gloo", init_method=arguments.dist_url, world_size=arguments.world_size, rank=rank)
    model = DistributedDataParallel(models.shufflenet_v2_x0_5(num_classes=10))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=30, gamma=0.1)
    augmented = transforms.Compose([transforms.RandomHorizontalFlip(), transforms.ToTensor()])
    train_data = datasets.FakeData(48, (3, 16, 16), 10, augmented)
    val_data = datasets.FakeData(26, (3, 16, 16), 10, transforms.ToTensor())
    train_sampler = DistributedSampler(train_data)
    val_sampler = DistributedSampler(val_data, shuffle=False, drop_last=True)
    batch_size = arguments.batch_size // arguments.world_size
    train_loader = DataLoader(train_data, batch_size, num_workers=arguments.workers, sampler=train_sampler)
    val_loader = DataLoader(val_data, batch_size, num_workers=arguments.workers, sampler=val_sampler)
    for epoch in range(arguments.epochs):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer)
        validate(val_loader, val_sampler, model, criterion, arguments)
        scheduler.step()


def train(loader, model, criterion, optimizer):
    losses = AverageMeter()
    model.train()
    for images, target in loader:
        loss = criterion(model(images), target)
        losses.update(loss.item(), len(images))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def validate(loader, sampler, model, criterion, arguments):
    losses = AverageMeter()

    def run_validate(loader):
        with torch.no_grad():
            for images, target in loader:
                losses.update(criterion(model(images), target).item(), len(images))

    model.eval()
    run_validate(loader)
    losses.all_reduce()
    covered = len(sampler) * arguments.world_size
    if covered < len(loader.dataset):
        rest = Subset(loader.dataset, range(covered, len(loader.dataset)))
        run_validate(DataLoader(rest, loader.batch_size, num_workers=arguments.workers))
    if dist.get_rank() == 0:
        print(f"loss {losses.total / losses.count:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--dist-url", default="env://")
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    mp.spawn(main_worker, nprocs=arguments.world_size, args=(arguments,))

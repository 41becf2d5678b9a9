"""A bare script that trains the small CNN on digits: what benchmarks.whole_run sets `ddp train digits` beside.

    python benchmarks/bare_digits.py EPOCHS FILE [MICRO_BATCHES]

A batch of 64 is computed at once, or in so many micro-batches, one after the other, whose gradients add up in `.grad`.
Nothing of this project is imported. Prints one line of JSON with the times (as of time.time()) of the end of the first
step, of the last step, and of the last evaluation with the weights saved to FILE.
"""

import json
import math
import sys
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, BATCH, WARMUP, TRAINING = 24, 64, 22, 1438


def convolution(inputs: int, outputs: int) -> list[nn.Module]:
    """A convolution as the CNN has three of."""
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def main() -> None:
    """Train, evaluate, save; print the times."""
    epochs, path = int(sys.argv[1]), sys.argv[2]
    parts = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    images, targets = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels)
    shuffled = torch.randperm(len(images))
    train, test = shuffled[:TRAINING], shuffled[TRAINING:]
    batches = DataLoader(TensorDataset(images[train], targets[train]), batch_size=BATCH, shuffle=True, drop_last=True)
    model = nn.Sequential(
        *convolution(1, WIDTH),
        *convolution(WIDTH, 2 * WIDTH),
        nn.MaxPool2d(2),
        *convolution(2 * WIDTH, 2 * WIDTH),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.4),
        nn.Linear(2 * WIDTH * 4, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    steps = epochs * len(batches)

    def rate(step: int) -> float:
        if step < WARMUP:
            return (step + 1) / WARMUP
        return 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / max(1, steps - WARMUP)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    criterion, times = nn.CrossEntropyLoss(), dict[str, float]()
    for _ in range(epochs):
        model.train()
        for images_of_batch, labels_of_batch in batches:
            optimizer.zero_grad()
            mean_loss = 0.0
            for inputs, wanted in zip(images_of_batch.chunk(parts), labels_of_batch.chunk(parts), strict=True):
                loss = criterion(model(inputs), wanted) / parts
                loss.backward()
                mean_loss += loss.item()
            optimizer.step()
            schedule.step()
            times.setdefault("first_step", time.time())
        times["last_step"] = time.time()
        model.eval()
        with torch.no_grad():
            right = int((model(images[test]).argmax(1) == targets[test]).sum())
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    times["saved"] = time.time()
    print(json.dumps(times | {"steps": steps, "accuracy": right / len(test)}))


if __name__ == "__main__":
    main()

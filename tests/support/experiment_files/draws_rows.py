"""What the experiments share that draw random numbers: 40 rows of noise, and two layers over them."""

from torch import Generator, Tensor, nn, randint, randn


def data() -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    generator = Generator().manual_seed(1)
    rows, classes = randn(60, 6, generator=generator), randint(3, (60,), generator=generator)
    samples = list(zip(rows, classes, strict=True))
    return samples[:40], samples[40:]


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


SETTINGS = {
    "loss": "cross_entropy",
    "global_batch_size": 24,
    "micro_batch": 4,
    "last_batch": "keep",
    "epochs": 3,
    "reduction": "exact",
    "evaluation": {"samples_per_batch": 4},
}

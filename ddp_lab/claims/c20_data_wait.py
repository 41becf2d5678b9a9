"""How long does the device wait for data whose samples cost as much as training on them, and do loader workers help?

Each sample is unpacked (zlib) and resized when it is fetched, as stored images are. Without workers the training
process does that itself, between steps. With workers, other processes prepare the samples of later steps while the
training process trains. That hides the wait where the workers have cores to run on: on two cores, one worker and the
training process fill them, and more workers only take turns. This file is both the claim and the experiment that it
trains.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ddp_core.data.splits import Splits
from ddp_core.spec.experiment import Component, Experiment, Optimizer
from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.framework.statistics import median_interval
from ddp_lab.claims.measuring.training import train
from ddp_lab.records import Axis, Figure, Line, Series

claim = Claim(
    id="C20",
    title="DataLoader workers prefetch so that the device does not wait",
    claim="A DataLoader with several worker processes loads and prepares data ahead in a queue, from which the main "
    "process takes them.",
    original="\\_MultiProcessingDataLoaderIter中会加载多个进程，主进程负责维护一个索引队列，其他进程从队列中获取数据索引，"
    "再从数据集中加载数据并进行预处理，处理后数据放在结果队列中，供主进程使用。",
    sources=("000",),
    method="One process trains on samples that are unpacked and resized as they are fetched, with 0, 1, 2 and 4 loader "
    "workers: the share of each window of steps that training waited for data.",
    rule="Confirmed when with some number of workers the 99 % interval of the wait share lies below the one without "
    "workers. Refuted when it lies above for every number. Otherwise inconclusive. Not measurable with one core.",
    seconds=(25, 60),
)

WORKERS = (0, 1, 2, 4)
LOG_EVERY = 4
IMAGE_SIZE, STORED_SIZE = 32, 320


class StoredImages:
    """Packed byte images: unpacked, resized and turned to float32 [3, 32, 32] when fetched."""

    def __init__(self, size: int) -> None:
        generator = np.random.Generator(np.random.PCG64(0))
        self.size = size
        self.packed = []
        for _ in range(16):
            coarse = generator.integers(0, 256, (3, 40, 40), dtype=np.uint8)
            self.packed.append(zlib.compress(coarse.repeat(8, axis=1).repeat(8, axis=2).tobytes(), 6))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        pixels = np.frombuffer(zlib.decompress(self.packed[index % len(self.packed)]), dtype=np.uint8)
        image = torch.from_numpy(pixels.reshape(1, 3, STORED_SIZE, STORED_SIZE).astype(np.float32) / 255)
        small = functional.interpolate(image, size=IMAGE_SIZE, mode="bilinear", antialias=True, align_corners=False)
        return small[0], torch.tensor(index % 10)


def stored_images(size: int = 64_000) -> Splits:
    """Images that cost time to fetch."""
    return Splits(train=StoredImages(size), classes=10, digest="stored_images-1")


experiment = Experiment(
    name="data_wait",
    model=Component(name="small_cnn", options={"width": 16, "dropout": 0.0, "image_size": IMAGE_SIZE, "channels": 3}),
    data=Component(name="stored_images"),
    optimizer=Optimizer(name="sgd", lr=0.01),
    global_batch_size=32,
    reduction="plain",
)


def measure(setting: Setting) -> Measurements:
    """The share of each window of steps that training waited for data, in percent, by number of workers."""
    shares: dict[str, list[float]] = {str(workers): [] for workers in WORKERS}
    steps = setting.choose(48, 200)
    for turn in range(setting.choose(1, 3)):
        for workers in WORKERS if turn % 2 == 0 else reversed(WORKERS):
            run = train(
                setting,
                "C20",
                __file__,
                settings=(f"max_steps={steps}",),
                options=("--workers", str(workers), "--log-every", str(LOG_EVERY)),
            )
            # The first windows still use samples that the workers prepared while training started.
            windows = {line["step"]: line["data_wait"] for line in run.metrics("step") if line["step"] > 3 * LOG_EVERY}
            shares[str(workers)] += [100 * windows[step] for step in sorted(windows) if step % LOG_EVERY == 0]
    return {"cores": setting.cores, "device": setting.device_type(1), "wait_percent": shares}


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    cores, shares = measurements["cores"], measurements["wait_percent"]
    intervals = {workers: median_interval(values) for workers, values in shares.items()}
    figures = [
        Figure(f"wait for data, {workers} workers", found.value, "%", found.low, found.high)
        for workers, found in intervals.items()
    ]
    plot = Series(
        f"Share of a step that waits for data, {cores} cores",
        Axis("loader workers", "", list(intervals)),
        Axis("wait", "%"),
        [
            Line(
                "median",
                *[[getattr(found, part) for found in intervals.values()] for part in ("value", "low", "high")],
            )
        ],
    )
    if cores < 2:
        return Judgement("not measurable here", f"needs 2 cores, found {cores}", figures, [plot])
    alone = intervals["0"]
    others = {workers: found for workers, found in intervals.items() if workers != "0"}
    best = min(others, key=lambda workers: others[workers].value)
    text = f"{alone.value:.0f} % wait without workers, {others[best].value:.0f} % with {best}"
    more = [workers for workers in others if int(workers) >= cores]
    if more:
        shown = ", ".join(f"{workers}: {others[workers].value:.0f} %" for workers in more)
        text += f"; there are {cores} cores for the training process and its workers together ({shown})"
    if others[best].high < alone.low:
        return Judgement("confirmed", text, figures, [plot])
    if all(found.low > alone.high for found in others.values()):
        return Judgement("refuted", text, figures, [plot])
    return Judgement("inconclusive", f"the intervals overlap: {text}", figures, [plot])

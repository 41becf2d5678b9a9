"""Do loader workers fetch ahead, and does a step then wait less for its data?

Each sample is unpacked (zlib) and resized when it is fetched, as stored images are. A smaller share of waiting is not
yet more speed: workers that take the training process's core away make it wait less and compute longer. So the samples
per second decide.
"""

from __future__ import annotations

import os
import time
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from ddp_core.base.process import keep_freed_memory
from ddp_core.model.builders import small_cnn
from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, composed, versions
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.framework.statistics import ROUNDS, line, median_interval, ratio_interval
from ddp_lab.claims.measuring.ranks import own_device, run_ranks
from ddp_lab.records import COUNT, Axis, Figure, Part, Series, Verdict

claim = Claim(
    id="C20",
    title="DataLoader workers prefetch so that the device does not wait",
    claim="A DataLoader with several worker processes loads and prepares data ahead in a queue, from which the main "
    "process takes them, so that training waits less and is faster.",
    original="\\_MultiProcessingDataLoaderIter中会加载多个进程，主进程负责维护一个索引队列，其他进程从队列中获取数据索引，"
    "再从数据集中加载数据并进行预处理，处理后数据放在结果队列中，供主进程使用。",
    sources=("000",),
    method="One process trains a small CNN on samples that are unpacked and resized as they are fetched, through "
    "torch's DataLoader with 0, 1, 2 and 4 workers, in interleaved rounds: samples per second of a number of steps "
    "after the first ones (whose batches the workers prepared before), and the share of that time in which the "
    "training process waits for a batch. Then a loader with 2 workers gives one batch and is left alone until no more "
    "samples are fetched: which processes fetched samples, and how many batches are ready.",
    rule="Two parts. Fetches ahead: confirmed when every worker and never the main process has fetched samples, and "
    "the batches that are ready are prefetch_factor times the workers; refuted when the main process fetched or no "
    "batch is ready, else inconclusive. Faster: confirmed when with 2 workers the samples per second are above those "
    "without workers beyond noise, refuted when below, else inconclusive; not measurable with one core. The shares of "
    "waiting, and 1 and 4 workers, are reported.",
    in_short="Confirmed where workers alone have fetched as far ahead as they may, and two give more samples per "
    "second beyond noise.",
    loads={
        "rounds": ROUNDS,
        "steps": (16, 16),
        "first_steps": (10, 10),
        "samples_per_batch": (32, 32),
        "workers": ((0, 1, 2, 4), (0, 1, 2, 4)),
        "workers_judged": (2, 2),
        "prefetch_factor": (2, 2),
    },
    history=versions(
        "2026-11-22 865fdf5133a02a53 Judged by samples per second in interleaved rounds, with a number of workers that "
        "is fixed beforehand; before, by the share of waiting of the best number of workers, which says nothing of "
        "speed. That workers fetch ahead is a part of its own, observed instead of supposed.",
        "2026-11-25 77d897c4c2cbff46 Beyond noise is the exact sign test with Holm's procedure over all intervals that "
        "bear verdicts, and the rounds follow from it.",
    ),
    seconds=(150, 445),
    tests=1,
)


IMAGE_SIZE, STORED_SIZE, KINDS = 32, 320, 10
AHEAD, FASTER = "workers fetch ahead into a queue", "training is faster with workers"


class StoredImages(Dataset[tuple[Tensor, Tensor]]):
    """Packed byte images: unpacked, resized and turned to float32 [3, 32, 32] when fetched, which is noted."""

    def __init__(self, size: int) -> None:
        generator = np.random.Generator(np.random.PCG64(0))
        self.size = size
        self.packed = []
        for _ in range(16):
            coarse = generator.integers(0, 256, (3, 40, 40), dtype=np.uint8)
            self.packed.append(zlib.compress(coarse.repeat(8, axis=1).repeat(8, axis=2).tobytes(), 6))
        self.fetched_by = torch.zeros(size, dtype=torch.int64).share_memory_()
        """By sample, the process that fetched it last; 0 for none."""

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        pixels = np.frombuffer(zlib.decompress(self.packed[index % len(self.packed)]), dtype=np.uint8)
        image = torch.from_numpy(pixels.reshape(1, 3, STORED_SIZE, STORED_SIZE).astype(np.float32) / 255)
        small = functional.interpolate(image, size=IMAGE_SIZE, mode="bilinear", antialias=True, align_corners=False)
        self.fetched_by[index] = os.getpid()
        return small[0], torch.tensor(index % KINDS)


def measure(setting: Setting) -> Measurements:
    """Samples per second and shares of waiting by workers and round; and what a loader that is left alone does."""
    load, device = claim.load(setting), setting.device_type(1)
    (timed,) = run_ranks(time_workers, 1, device, load, device=device, timeout=1800, with_children=True)
    ahead = (load.workers_judged, load.prefetch_factor, load.samples_per_batch)
    (alone,) = run_ranks(leave_alone, 1, *ahead, with_children=True)
    facts = {"cores": setting.cores, "device": device, "judged": str(load.workers_judged)}
    return {**facts, "alone": alone, **timed}


def time_workers(rank: int, world_size: int, device: str, load: Any) -> dict[str, Any]:
    """Samples per second, and the percentage of time spent waiting for data, by number of workers and round."""
    keep_freed_memory()
    # More workers than cores are measured on purpose.
    warnings.filterwarnings("ignore", "This DataLoader will create")
    place, batch = own_device(rank, device), load.samples_per_batch
    model = small_cnn(width=16, dropout=0.0, image_size=IMAGE_SIZE, channels=3).to(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train(batches: Iterator[tuple[Tensor, Tensor]], steps: int) -> float:
        """Train so many steps; returns the seconds of waiting for data."""
        waited = 0.0
        for _ in range(steps):
            began = time.perf_counter()
            inputs, targets = next(batches)
            waited += time.perf_counter() - began
            optimizer.zero_grad()
            # .item() waits for a CUDA device, so that its work does not count as waiting for the next batch.
            loss = functional.cross_entropy(model(inputs.to(place)), targets.to(place))
            loss.backward()
            optimizer.step()
            loss.item()
        return waited

    speeds: dict[str, list[float]] = {str(workers): [] for workers in load.workers}
    waits: dict[str, list[float]] = {workers: [] for workers in speeds}
    images = StoredImages(batch * (load.first_steps + load.steps + 100))
    for turn in range(load.rounds):
        for workers in load.workers if turn % 2 == 0 else reversed(load.workers):
            batches = iter(DataLoader(images, batch_size=batch, num_workers=workers))
            train(batches, load.first_steps)
            began = time.perf_counter()
            waited = train(batches, load.steps)
            seconds = time.perf_counter() - began
            del batches
            speeds[str(workers)].append(batch * load.steps / seconds)
            waits[str(workers)].append(100 * waited / seconds)
    return {"samples_per_second": speeds, "wait_percent": waits}


def leave_alone(rank: int, world_size: int, workers: int, factor: int, batch: int) -> dict[str, Any]:
    """Take one batch, then nothing until no more samples are fetched; what was fetched by then, and by which."""
    images = StoredImages(batch * workers * factor * 4)
    batches = iter(DataLoader(images, batch_size=batch, num_workers=workers, prefetch_factor=factor))
    next(batches)
    seen, since, end = -1, time.monotonic(), time.monotonic() + 60
    while time.monotonic() < min(since + 2, end):
        fetched = int((images.fetched_by > 0).sum())
        if fetched != seen:
            seen, since = fetched, time.monotonic()
        time.sleep(0.05)
    processes = set(images.fetched_by.tolist()) - {0}
    del batches
    return {
        "workers": workers,
        "prefetch_factor": factor,
        "processes": len(processes),
        "main_process_fetched": os.getpid() in processes,
        "batches_ready": seen / batch - 1,
    }


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    speeds, alone, judged = (measurements[name] for name in ("samples_per_second", "alone", "judged"))
    cores, ready, processes = measurements["cores"], alone["batches_ready"], alone["processes"]
    figures = [
        Figure("batches ready while the main process takes none", ready, part=AHEAD, bounds=COUNT),
        Figure("processes that fetched samples", processes, part=AHEAD),
    ]
    ratios = {workers: ratio_interval(speeds[workers], speeds["0"]) for workers in speeds if workers != "0"}
    for workers, ratio in ratios.items():
        name, against = f"samples per second, {workers} workers / none", 1.0 if workers == judged else None
        figures.append(ratio.figure(name, "x", FASTER, against=against))
    shares = {workers: median_interval(values) for workers, values in measurements["wait_percent"].items()}
    figures += [share.figure(f"wait for data, {workers} workers", "%", FASTER) for workers, share in shares.items()]
    title = f"Share of a step that waits for data, {cores} cores"
    plots = [
        Series(title, Axis("loader workers", "", list(found)), Axis(*axis), [line("median", found.values())])
        for title, axis, found in (
            ("Samples per second", ("speed", "1/s"), {each: median_interval(speeds[each]) for each in speeds}),
            (title, ("wait", "%"), shares),
        )
    ]
    faster = Part(FASTER, "not measurable here", f"needs 2 cores, found {cores}")
    if cores >= 2:
        said = f"{ratios[judged]} times the samples per second with {judged} workers on {cores} cores; the wait for "
        said += f"data is {shares['0'].value:.0f} % without workers and {shares[judged].value:.0f} % with them"
        faster = Part(FASTER, ratios[judged].side(), said)
    return composed([_ahead(alone), faster], figures, plots)


def _ahead(alone: dict[str, Any]) -> Part:
    wanted = alone["prefetch_factor"] * alone["workers"]
    said = f"{alone['batches_ready']:g} batches were ready, fetched by {alone['processes']} processes"
    said += ", the main process among them" if alone["main_process_fetched"] else " other than the main process"
    verdict: Verdict = "inconclusive"
    if alone["main_process_fetched"] or alone["batches_ready"] <= 0:
        verdict = "refuted"
    elif alone["processes"] == alone["workers"] and alone["batches_ready"] == wanted:
        verdict = "confirmed"
    return Part(AHEAD, verdict, said)

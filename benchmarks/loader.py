"""Images per second that a loader alone delivers on the host, against torch's ways to load the same data set.

    python -m benchmarks.loader [--quick] [--json PATH]

Images kept as bytes, 75 MB of them as 224x224 and as many as 32x32, without augmentation. A step is a global batch of
256 in micro-batches of 32. Each contender has a process of its own with one thread, and they take turns. The first is
the way in which everything is made in line: rows gathered, turned to float32 and standardised. On a GPU the host makes
less: it only gathers bytes, in a thread beside training, and the device does the rest. That host part is measured here
without a device, and, where there is one, with pinned memory, copies and all. `memory kept` means that malloc keeps
what is freed (ddp_core/base/process.py), as in every run.

Nothing is trained, so these figures are ceilings. Each turn begins with one step that is not timed.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, Subset

from benchmarks.record import record
from benchmarks.turns import Seconds, Turn, take_turns
from ddp_core.base.process import keep_freed_memory
from ddp_core.base.trees import StepIds
from ddp_core.data.loader import Loader
from ddp_core.data.prefetching import made_ahead
from ddp_core.data.splits import ByteImages
from ddp_core.sampler import GlobalOrder

GLOBAL_BATCH, MICRO_BATCH = 256, 32
PIXELS = 25_000_000
STEPS = {224: 12, 32: 100}
"""Steps of a turn, by the images' side."""
WORKERS = 2
ROUNDS = 11
GOAL = 4.0
MEASURES = ("images_per_second", "times_the_first")
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Stream = Generator[Any, None, None]
MakeStream = Callable[[ByteImages, int], Stream]
"""The steps of a data set, at least as many as asked for."""


def images(side: int, pixels: int) -> ByteImages:
    """Random pictures uint8 [n, 3, side, side] with labels."""
    generator = torch.Generator().manual_seed(0)
    number = pixels // side**2
    stored = torch.randint(0, 256, (number, 3, side, side), dtype=torch.uint8, generator=generator)
    return ByteImages(stored, torch.arange(number) % 10, MEAN, DEVIATION, max(number, GLOBAL_BATCH))


class OneByOne:
    """The data set of a tutorial: one picture at a time, standardised where it is fetched."""

    def __init__(self, stored: ByteImages) -> None:
        self.stored = stored
        self.mean, self.deviation = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(DEVIATION).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.stored.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = self.stored.inputs[index].float().div_(255)
        return pixels.sub_(self.mean).div_(self.deviation), int(self.stored.targets[index])


def wanted(samples: int) -> Iterator[StepIds]:
    """The ids of one step after the other, without end."""
    order, steps = GlobalOrder(samples, 0), samples // GLOBAL_BATCH
    for step in count():
        epoch, start = step // steps, step % steps * GLOBAL_BATCH
        starts = range(start, start + GLOBAL_BATCH, MICRO_BATCH)
        yield epoch, [order.ids(epoch, first, first + MICRO_BATCH) for first in starts]


def in_line(dataset: ByteImages, steps: int) -> Stream:
    """Everything in the training thread, as on the CPU."""
    return Loader(dataset).stream(wanted(len(dataset)))


def host_part(dataset: ByteImages, steps: int) -> Stream:
    """What a GPU leaves to the host, in line."""
    loader = Loader(dataset)
    for epoch, micro_batches, *_ in wanted(len(dataset)):
        yield [loader.gather(epoch, ids) for ids in micro_batches]


def host_part_ahead(dataset: ByteImages, steps: int) -> Stream:
    """What a GPU leaves to the host, in the thread that works ahead."""
    loader = Loader(dataset)
    return made_ahead(wanted(len(dataset)), lambda step: [loader.gather(step[0], ids) for ids in step[1]])


def on_gpu(dataset: ByteImages, steps: int) -> Stream:
    """Pinned, copied and standardised on the GPU, ahead of the training stream."""
    for step in Loader(dataset, device=torch.device("cuda", 0)).stream(wanted(len(dataset))):
        torch.cuda.current_stream().synchronize()
        yield step


def by_data_loader(dataset: ByteImages, steps: int) -> Stream:
    """torch's DataLoader with worker processes, a micro-batch by one call of `__getitems__`."""
    return _steps(dataset, steps, num_workers=WORKERS, collate_fn=_as_it_is)


def plain(dataset: ByteImages, steps: int) -> Stream:
    """A plain torch.utils.data pipeline: a subset of single samples, shuffled and collated by torch."""
    alone = OneByOne(dataset)
    return _steps(Subset(alone, range(len(alone))), steps, num_workers=0)  # type: ignore[arg-type]


def _steps(dataset: Any, steps: int, **options: Any) -> Stream:
    sampler = RandomSampler(dataset, replacement=True, num_samples=steps * GLOBAL_BATCH)
    batches = iter(DataLoader(dataset, batch_size=MICRO_BATCH, sampler=sampler, **options))
    for _ in range(steps):
        yield [next(batches) for _ in range(GLOBAL_BATCH // MICRO_BATCH)]


def _as_it_is(batch: Any) -> Any:
    return batch


def contender(stream: MakeStream, keeps: bool, quick: bool) -> Turn:
    """Turns that take steps from new streams, of large images and of small ones."""
    if keeps:
        keep_freed_memory()
    datasets = {side: images(side, PIXELS // 10 if quick else PIXELS) for side in STEPS}

    def turn() -> Seconds:
        return {f"{side}x{side}": seconds(side, 2 if quick else steps) for side, steps in STEPS.items()}

    def seconds(side: int, steps: int) -> float:
        with closing(stream(datasets[side], 1 + steps)) as loaded:
            next(loaded)
            started = time.perf_counter()
            for _ in range(steps):
                next(loaded)
            return (time.perf_counter() - started) / steps

    return turn


def contenders() -> dict[str, tuple[MakeStream, bool]]:
    """By name: the stream, and whether malloc keeps freed memory."""
    found: dict[str, tuple[MakeStream, bool]] = {
        "in line, float32": (in_line, False),
        "in line, float32, memory kept": (in_line, True),
        "host part in line": (host_part, False),
        "host part in line, memory kept": (host_part, True),
        "host part ahead, memory kept": (host_part_ahead, True),
        f"DataLoader, {WORKERS} workers": (by_data_loader, False),
        "plain torch.utils.data": (plain, False),
    }
    return found | ({"on the GPU": (on_gpu, True)} if torch.cuda.is_available() else {})


def speeds(seconds: dict[str, list[Seconds]], kind: str) -> dict[str, dict[str, float]]:
    """Per contender: images per second, and how many times the first contender's in the same round."""
    first, result = next(iter(seconds.values())), {}
    for name, turns in seconds.items():
        rates = [GLOBAL_BATCH / turn[kind] for turn in turns]
        ratios = [base[kind] / turn[kind] for base, turn in zip(first, turns, strict=True)]
        found = dict(zip(MEASURES, (rates, ratios), strict=True))
        result[name] = {
            f"{what}_{of.__name__}": round(of(values), 2) for what, values in found.items() for of in (min, median, max)
        }
    return result


def main() -> None:
    """Measure, print, and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--json", type=Path, help="where to record the results (default: benchmarks/results)")
    arguments = parser.parse_args()
    rounds, before = 1 if arguments.quick else ROUNDS, os.getloadavg()
    arms = {name: (contender, (*details, arguments.quick)) for name, details in contenders().items()}
    seconds = take_turns(arms, rounds)
    results: dict[str, Any] = {
        "load_average": {
            "before": [round(load, 2) for load in before],
            "after": [round(x, 2) for x in os.getloadavg()],
        },
        "rounds": rounds,
        "goal": f"the host part ahead at least {GOAL:.0f} times as fast as the first",
    }
    for kind in next(iter(seconds.values()))[0]:
        results[kind] = speeds(seconds, kind)
        print(f"{kind}, images/s: minimum, median, maximum; times the first: minimum, median, maximum")
        for name, found in results[kind].items():
            figures = [[found[f"{what}_{of}"] for of in ("min", "median", "max")] for what in MEASURES]
            rates, ratios = "".join(f"{rate:11,.0f}" for rate in figures[0]), "".join(f"{x:8.2f}x" for x in figures[1])
            print(f"  {name:32}{rates}{ratios}")
    command = "python -m benchmarks.loader" + (" --quick" if arguments.quick else "")
    print(f"recorded in {record('loader', command, results, arguments.json, rounds)}")


if __name__ == "__main__":
    main()

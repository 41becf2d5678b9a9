"""What a checkpoint costs: how long training waits for one, its share of the step time, its size, and loading.

    python -m benchmarks.checkpoint [--quick] [--directory DIR] [--json PATH]

The state is that of ResNet-18 (1000 classes) with SGD momentum: twice 11.7 million floats. Two questions:

stall: how long does training wait for one save, when the save before is already written? Four ways to save take turns:
`torch.save` to a path (without fsync); a synchronous `Checkpointer.save`; an asynchronous one that copies everything
before it returns; and one that copies while training goes on to its next update, as `Trainer` does. The last counts the
call and what the update still has to wait for. Figures are medians.

share: what does one save cost in real training with steps of roughly 100 ms? That is what it adds to its own step and,
while it is written, to the steps after it, each against the median of the eight steps just before; as a share of 50
steps, so at one save per 50. Measured once with a free core for the writer, where there is one, and once with a
neighbour that trains on each other core.

Both need a machine with nothing else to do: the load average before the start is recorded with the results.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn

from benchmarks.record import record, usable_cores
from ddp_core.checkpoint import Checkpointer, describe, load, newest_valid, verify
from ddp_core.model.builders import resnet18

STEPS_PER_SAVE = 50
STEP_SECONDS = 0.1
PLAIN_STEPS = 8
SIDE = 64


class Training:
    """ResNet-18 with momentum on random images: something to interrupt."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = resnet18(classes=1000)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)
        self.micro_batch = 1
        self.step()

    def step(self, checkpointer: Checkpointer | None = None) -> float:
        """One optimizer update; returns the seconds for which it waits for the checkpointer's copy."""
        images = torch.randn(self.micro_batch, 3, SIDE, SIDE)
        self.optimizer.zero_grad()
        self.model(images).square().mean().backward()
        waited = timed(checkpointer.before_update) if checkpointer is not None else 0.0
        self.optimizer.step()
        return waited

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def calibrate(self) -> None:
        """Choose the micro-batch whose step comes nearest to STEP_SECONDS."""
        seconds: dict[int, float] = {}
        for self.micro_batch in (1, 2, 4, 6, 8, 12, 16, 24, 32, 64):
            self.step()
            seconds[self.micro_batch] = min(timed(self.step) for _ in range(3))
            if seconds[self.micro_batch] > STEP_SECONDS:
                break
        self.micro_batch = min(seconds, key=lambda size: abs(seconds[size] - STEP_SECONDS))


def neighbour() -> None:
    """Train until killed: what the other ranks of this host do."""
    torch.set_num_threads(1)
    training = Training()
    training.micro_batch = 4
    while True:
        training.step()


def timed(action: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def stalls(training: Training, directory: Path, rounds: int) -> dict[str, Any]:
    """Median seconds that each way to save keeps its caller waiting.

    `asynchronous_of_torch_save` is the median ratio of the asynchronous way to torch.save.
    """
    background = Checkpointer(directory / "aside", asynchronous=True)
    foreground = Checkpointer(directory / "now")
    background.prepare(training.state())
    ways = ("torch.save", "synchronous", "asynchronous, copied at once", "asynchronous", "until written")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for step in range(1, rounds + 1):
        training.step()
        state = training.state()
        seconds["torch.save"].append(timed(partial(torch.save, state, directory / "plain.pt")))
        seconds["synchronous"].append(timed(partial(foreground.save, state, step=step, epoch=0)))
        started = time.perf_counter()
        background.save(state, step=2 * step, epoch=0)
        seconds["asynchronous, copied at once"].append(time.perf_counter() - started)
        background.wait()
        seconds["until written"].append(time.perf_counter() - started)
        call = timed(lambda: background.save(state, step=2 * step + 1, epoch=0, changing=training.model.buffers()))  # noqa: B023
        seconds["asynchronous"].append(call + training.step(background))
        background.wait()
    background.close()
    ratios = [aside / plain for aside, plain in zip(seconds["asynchronous"], seconds["torch.save"], strict=True)]
    return {
        "rounds": rounds,
        "median_s": {name: round(median(values), 5) for name, values in seconds.items()},
        "asynchronous_worst_s": round(max(seconds["asynchronous"]), 5),
        "asynchronous_of_torch_save": round(median(ratios), 4),
        "plain_bytes": (directory / "plain.pt").stat().st_size,
    }


def shares(directory: Path, neighbours: int, episodes: int) -> dict[str, Any]:
    """Seconds that one save adds to the steps around it, as a share of STEPS_PER_SAVE steps; medians over episodes."""
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=neighbour, daemon=True) for _ in range(neighbours)]
    for other in others:
        other.start()
    try:
        return {"neighbours": neighbours, **_shares(directory / f"neighbours-{neighbours}", episodes)}
    finally:
        for other in others:
            other.kill()
            other.join()


def _shares(directory: Path, episodes: int) -> dict[str, Any]:
    training = Training()
    training.calibrate()
    steps: list[float] = []
    extra: dict[str, list[float]] = {"torch.save": [], "asynchronous": []}
    stall: list[float] = []
    touched: list[int] = []
    with Checkpointer(directory, asynchronous=True) as checkpointer:
        checkpointer.prepare(training.state())
        for number in range(1, episodes + 1):
            for kind, seconds in extra.items():
                before = [timed(training.step) for _ in range(PLAIN_STEPS)]
                state, saved = training.state(), checkpointer.last
                if kind == "torch.save":
                    call = timed(partial(torch.save, state, directory / "plain.pt"))
                    during = [timed(training.step) for _ in range(2)]  # the kernel writes its pages back
                else:
                    changing = training.model.buffers()
                    call = timed(partial(checkpointer.save, state, step=number, epoch=0, changing=changing))
                    during, waited = [], 0.0
                    while checkpointer.last is saved:
                        started = time.perf_counter()
                        waited += training.step(checkpointer)
                        during.append(time.perf_counter() - started)
                        checkpointer.check()
                    checkpointer.wait()
                    stall.append(call + waited)
                    touched.append(len(during))
                usual = median(before)
                steps.append(usual)
                seconds.append((call + sum(during) - usual * len(during)) / (STEPS_PER_SAVE * usual))
    return {
        "episodes": episodes,
        "micro_batch": training.micro_batch,
        "step_s": round(median(steps), 4),
        "steps_while_writing": median(touched),
        "stall_s": round(median(stall), 5),
        "share_median": {kind: round(median(values), 4) for kind, values in extra.items()},
        "share_quartiles": {kind: [round(q, 4) for q in quantiles(values)] for kind, values in extra.items()},
    }


def reading(training: Training, directory: Path, rounds: int) -> dict[str, Any]:
    """Median seconds to verify, and to verify and load; bytes on disk."""
    with Checkpointer(directory / "reading") as checkpointer:
        checkpointer.save(training.state(), step=1, epoch=0)
    checkpoint = newest_valid(directory / "reading")
    assert checkpoint is not None
    expected = describe(training.state())
    return {
        "rounds": rounds,
        "bytes": checkpoint.bytes,
        "manifest_bytes": checkpoint.manifest.stat().st_size,
        "verify_s": round(median(timed(lambda: verify(checkpoint)) for _ in range(rounds)), 5),
        "verify_and_load_s": round(median(timed(lambda: load(checkpoint, expect=expected)) for _ in range(rounds)), 5),
    }


def main() -> None:
    """Measure, print, and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: half a minute instead of three")
    parser.add_argument("--directory", type=Path, help="where to write (default: a temporary directory)")
    parser.add_argument("--json", type=Path, help="where to record the results (default: benchmarks/results)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        directory = Path(name)
        training = Training()
        results: dict[str, Any] = {
            "load_average_before": [round(value, 2) for value in os.getloadavg()],
            "stall": stalls(training, directory, 5 if arguments.quick else 15),
        }
        print(results["stall"], flush=True)
        results["reading"] = reading(training, directory, 5 if arguments.quick else 9)
        print(results["reading"], flush=True)
        results["share"] = []
        for neighbours in sorted({0, usable_cores() - 1}):
            results["share"].append(shares(directory, neighbours, 5 if arguments.quick else 25))
            print(results["share"][-1], flush=True)
    command = "python -m benchmarks.checkpoint" + (" --quick" if arguments.quick else "")
    print(f"recorded in {record('checkpoint', command, results, arguments.json, results['stall']['rounds'])}")


if __name__ == "__main__":
    main()

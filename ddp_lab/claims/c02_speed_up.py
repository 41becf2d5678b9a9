"""How much faster N workers are than one.

The work of an epoch is cut into N parts, but each step also pays for one all-reduce of all gradients, and waits for the
slowest of the N workers. Where a step has much work (a convolutional network), that costs little. Where it has hardly
any (the source's own linear model: two numbers, a fraction of a millisecond), that is nearly all of the time. Source
001 prints a "theoretical speed-up" that is t / (t / N), which is N whatever was measured; its own times, 2.15 s and
1.22 s, give 1.76 for two GPUs. Weak scaling keeps the batch of each worker, as the source does. Strong scaling keeps
the global batch, so each worker has less work per step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_core.model.builders import linear, resnet18
from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, missing
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.framework.statistics import Interval, ratio_interval
from ddp_lab.claims.measuring.measure import timed_rounds
from ddp_lab.claims.measuring.ranks import own_device, run_ranks
from ddp_lab.claims.measuring.scaling import measure_scaling, shown
from ddp_lab.records import Axis, Figure, Line, Series

claim = Claim(
    id="C02",
    title="N workers are about N times faster",
    claim="DDP training on N GPUs should be about N times as fast as on one.",
    original="使用 N 个 GPU 的 DDP 训练速度应该比单卡训练快约 N 倍",
    sources=("001",),
    method="Samples per second of training steps (forward, backward, all-reduce, SGD): one process against DDP on the "
    "first n of the same processes, in interleaved rounds. Two models: ResNet-18 at 32x32, and the toy, which is the "
    "source's linear model, for whole epochs of 10,000 points with its DataLoader. Weak scaling keeps the batch of "
    "each worker, as in the source; strong scaling keeps the global batch; as a control, n processes that do not "
    "communicate. On CPU each process has one thread; the toy is also measured with more processes than cores, and its "
    "figures say so. Besides, whole runs of digits on single, dp and ddp with 1 to 8 workers, weak and strong, with "
    "the digest of each.",
    rule="On ResNet-18, weak scaling, at the largest n with a core or CUDA device each: confirmed when the interval of "
    "the speed-up lies at or above 0.85 n, refuted when it lies below, inconclusive when 0.85 n is inside. Not "
    "measurable with fewer than two, or where n processes that do not communicate are not 0.85 n times as fast either: "
    "then the cores or devices are not free at the same time. The toy and the whole runs are reported, not judged.",
    seconds=(170, 300),
)

EFFICIENCY = 0.85
POINTS = 10_000


def measure(setting: Setting) -> Measurements:
    """For each way to train: the seconds of each round, and the samples that a round trains."""
    largest = min(setting.devices, 8)
    within = [count for count in (2, 4, 8) if count <= largest]
    device = setting.device_type(max(within, default=1))
    measured: dict[str, Any] = {"devices": setting.devices, "device": device, "models": {}}
    if within:
        batch, rounds = (32, setting.choose(7, 25)) if device == "cpu" else (256, 30)
        setting.say(f"ResNet-18 on up to {within[-1]} processes")
        ranks = run_ranks(resnet_ways, within[-1], device, within, batch, rounds, device=device, timeout=400)
        measured["models"]["resnet18"] = ranks[0]
    counts = sorted({2, 4, *within})
    setting.say(f"the source's linear model on up to {counts[-1]} processes")
    device = setting.device_type(counts[-1])
    ranks = run_ranks(toy_ways, counts[-1], device, counts, setting.choose(5, 9), device=device, timeout=400)
    measured["models"]["toy"] = ranks[0]
    measured["runs"] = measure_scaling(setting, claim.id)
    return measured


def resnet_ways(rank: int, world_size: int, device: str, counts: list[int], batch: int, rounds: int) -> dict[str, Any]:
    """Time steps of ResNet-18 on one process, and on the first n ranks: weak, strong, and without communication."""
    place = own_device(rank, device)
    images = torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(rank)).to(place)
    labels = torch.arange(batch).remainder(10).to(place)
    loss = nn.CrossEntropyLoss()

    def steps(size: int) -> Callable[[nn.Module, torch.optim.Optimizer], None]:
        def run(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            optimizer.zero_grad()
            loss(module(images[:size]), labels[:size]).backward()
            optimizer.step()

        return run

    def build() -> nn.Module:
        return resnet18(small_input=True).to(place)

    ways, samples = {"1": _way(rank, 1, None, build, steps(batch))}, {"1": batch}
    for count in counts:
        group = dist.new_group(range(count), backend="nccl" if device == "cuda" else "gloo")
        ways[f"weak {count}"] = _way(rank, count, group, build, steps(batch))
        samples[f"weak {count}"] = batch * count
        ways[f"strong {count}"] = _way(rank, count, group, build, steps(batch // count))
        samples[f"strong {count}"] = batch
        ways[f"apart {count}"] = _way(rank, count, None, build, steps(batch))
        samples[f"apart {count}"] = batch * count
    return {"samples": samples, "seconds": timed_rounds(ways, rounds)}


def toy_ways(rank: int, world_size: int, device: str, counts: list[int], rounds: int) -> dict[str, Any]:
    """Time epochs of the source's training: 32 points per worker (weak), or 32 points in all (strong)."""
    place = own_device(rank, device)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(POINTS, 1, generator=generator)
    points = TensorDataset(x, 2 * x + 3 + 0.1 * torch.randn(POINTS, 1, generator=generator))
    loss = nn.MSELoss()

    def epoch(count: int, batch: int) -> Callable[[nn.Module, torch.optim.Optimizer], None]:
        sampler: DistributedSampler[Any] = DistributedSampler(points, count, rank if rank < count else 0)

        def run(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            total = 0.0
            for inputs, targets in DataLoader(points, batch_size=batch, sampler=sampler):
                optimizer.zero_grad()
                found: Tensor = loss(module(inputs.to(place)), targets.to(place))
                found.backward()
                optimizer.step()
                total += found.item()

        return run

    def build() -> nn.Module:
        return linear().to(place)

    ways = {"1": _way(rank, 1, None, build, epoch(1, 32))}
    for count in counts:
        group = dist.new_group(range(count), backend="nccl" if device == "cuda" else "gloo")
        ways[f"weak {count}"] = _way(rank, count, group, build, epoch(count, 32))
        if 32 % count == 0:
            ways[f"strong {count}"] = _way(rank, count, group, build, epoch(count, 32 // count))
    return {"samples": dict.fromkeys(ways, POINTS), "seconds": timed_rounds(ways, rounds)}


def _way(
    rank: int,
    count: int,
    group: dist.ProcessGroup | None,
    build: Callable[[], nn.Module],
    work: Callable[[nn.Module, torch.optim.Optimizer], None],
) -> Callable[[], None]:
    """What this rank does when the first `count` ranks train: its share of the work, or nothing."""
    if rank >= count:
        return lambda: None
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    module = DistributedDataParallel(model, process_group=group) if group is not None else model
    return lambda: work(module, optimizer)


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    speeds = {name: _speed_ups(found) for name, found in measurements["models"].items()}
    unit = "CUDA devices" if measurements["device"] == "cuda" else "cores"
    figures = [
        Figure(
            f"speed-up of {name}, {way}{_sharing(way, measurements['devices'])}",
            speed.value,
            "x",
            speed.low,
            speed.high,
        )
        for name, ways in speeds.items()
        for way, speed in ways.items()
    ]
    series = [_plot(name, ways) for name, ways in speeds.items()]
    of_runs, plots = shown(measurements.get("runs", []))
    figures, series = figures + of_runs, series + plots
    counts = [int(way.split()[1]) for way in speeds.get("resnet18", {}) if way.startswith("weak")]
    within = [count for count in counts if count <= measurements["devices"]]
    if not within:
        return missing("two cores or two CUDA devices that can work at the same time", figures, series)
    count = max(within)
    speed, needed = speeds["resnet18"][f"weak {count}"], EFFICIENCY * count
    apart = speeds["resnet18"].get(f"apart {count}")
    toy = speeds.get("toy", {}).get(f"weak {count}")
    rest = f"; the source's linear model gets {toy.value:.2f} times" if toy is not None else ""
    said = f"{count} processes on {unit} train ResNet-18 {speed} times as fast, against {needed:.2f} asked for{rest}"
    if speed.low >= needed:
        return Judgement("confirmed", said, figures, series)
    if apart is not None and apart.high < needed:
        idle = f"{count} {unit} that are free at the same time: {count} processes that do not even communicate are only"
        return missing(f"{idle} {apart} times as fast", figures, series)
    if speed.high < needed:
        return Judgement("refuted", said, figures, series)
    return Judgement(
        "inconclusive", f"{said}: the interval holds the limit; use --full on a quiet machine", figures, series
    )


def _speed_ups(found: dict[str, Any]) -> dict[str, Interval]:
    seconds, samples = found["seconds"], found["samples"]
    return {
        way: ratio_interval(
            [one / samples["1"] for one in seconds["1"]], [taken / samples[way] for taken in seconds[way]]
        )
        for way in seconds
        if way != "1"
    }


def _sharing(way: str, devices: int) -> str:
    return " processes on fewer cores" if int(way.split()[1]) > devices else " processes"


def _plot(name: str, ways: dict[str, Interval]) -> Series:
    counts = sorted({int(way.split()[1]) for way in ways})
    lines = [Line("N times faster", [1.0, *map(float, counts)])]
    for kind in ("weak", "strong", "apart"):
        if not any(way.startswith(kind) for way in ways):
            continue
        found = [ways.get(f"{kind} {count}") for count in counts]
        lines.append(
            Line(
                "no communication" if kind == "apart" else f"{kind} scaling",
                [1.0, *(one.value if one else None for one in found)],
                [1.0, *(one.low if one else None for one in found)],
                [1.0, *(one.high if one else None for one in found)],
            )
        )
    return Series(f"Speed-up, {name}", Axis("processes", "", [1.0, *map(float, counts)]), Axis("speed-up", "x"), lines)

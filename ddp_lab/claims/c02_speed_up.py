"""How much faster N workers are than one.

Each step pays for one all-reduce of all gradients, so the answer depends on how much work a step has. Two things are
varied: the batch, and the first layers ("stem"): those for small images (3x3, stride 1) make ten times as much work of
a 32x32 image as torchvision's (7x7, stride 2 and a pooling layer). The source's own linear model is the extreme. Weak
scaling keeps the batch of each worker, as the source does, strong scaling the global batch.

No speed-up can be greater than n, so an interval above n says that the single process was slowed down by something
else, most likely by memory that went back to the kernel. So all ranks keep freed memory, and the single process and the
control train the same model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_core.model.builders import linear, resnet18
from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, composed, missing, versions
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.framework.statistics import ROUNDS, Interval, line, ratio_interval
from ddp_lab.claims.measuring.measure import timed_rounds
from ddp_lab.claims.measuring.ranks import own_device, run_ranks
from ddp_lab.claims.measuring.scaling import measure_scaling, shown
from ddp_lab.records import Axis, Line, Part, Series, Verdict

claim = Claim(
    id="C02",
    title="N workers are about N times faster",
    claim="DDP training on N GPUs should be about N times as fast as on one.",
    original="使用 N 个 GPU 的 DDP 训练速度应该比单卡训练快约 N 倍",
    sources=("001",),
    method="Samples per second of training steps (forward, backward, all-reduce, SGD) of ResNet-18 at 32x32, weak "
    "scaling: one process, DDP on n processes, and as a control n processes that do not communicate, in interleaved "
    "rounds of one step each, with n the largest of 2, 4 and 8 that have a core or CUDA device each. Swept: both "
    "stems, and the batch of each worker. On CPU each process has one thread. The source's own program, too: its "
    "linear model, for whole epochs of its 10,000 points with its DataLoader, with its batch for each worker (weak) "
    "and with that batch cut (strong), and n processes that do not communicate as a control; and in --full whole runs "
    "of digits on single, dp and ddp, with the digest of each.",
    rule="Each stem and batch is a part, and so is each way of the linear model. It is inconclusive where the "
    "interval of DDP's speed-up or of the control's lies above n, since that proves a broken baseline, not a "
    "speed-up. Else it is confirmed where DDP's interval lies above 0.85 n; refuted where DDP's lies below 1 and the "
    "control's above 1 (n processes are slower than one, though the cores are there); not measurable where the "
    "control's lies below 0.85 n (the cores or devices are not free at the same time); refuted where DDP's interval "
    "lies below 0.85 n and the control's above; else inconclusive. The sentence is judged by the parts that are "
    "measurable: confirmed when all are, confirmed in part when some are, refuted when none is and one is refuted. The "
    "whole runs are reported, not judged.",
    in_short="Confirmed where n processes are more than 0.85 n times as fast beyond noise; refuted where n are "
    "so only without communicating, or are slower than one.",
    loads={
        "efficiency": (0.85, 0.85),
        "rounds": ROUNDS,
        "small_stem_batches": ((8,), (8, 32)),
        "torchvision_stem_batches": ((64,), (64, 256)),
        "batches_on_cuda": ((256,), (64, 256)),
        "linear_model_rounds": ROUNDS,
        "linear_model_points": (10_000, 10_000),
        "linear_model_batch": (32, 32),
        "workers_of_whole_runs": ((), (2,)),
        "epochs_of_whole_runs": (3, 3),
        "global_batch_of_whole_runs": (64, 64),
    },
    history=versions(
        "2026-11-22 9730120dc7890664 The verdict comes from a sweep over stems and batches instead of one batch of one "
        "stem, and a speed-up above n is called a broken baseline; before, it counted as confirmed. The ranks keep "
        "freed memory, and the control trains the model of the single process.",
        "2026-11-25 fe9d803dcecf5e2a The source's own program is judged, too, beside a control of its own, and what is "
        "slower than one process is refuted however free the cores are; before, it was reported only. Beyond noise is "
        "the exact sign test with Holm's procedure over all intervals that bear verdicts, and the rounds follow from "
        "it.",
    ),
    seconds=(80, 480),
    tests=6,
)


TOY = {"weak": "the source's own program, a whole batch each", "strong": "the source's own program, one batch shared"}
STEMS = {"small": True, "torchvision's": False}


def measure(setting: Setting) -> Measurements:
    """For each way to train: the seconds of each round, and the samples that a round trains."""
    load, count, points = claim.load(setting), setting.ranks, []
    device = setting.device_type(count)
    for stem, batches in (("small", load.small_stem_batches), ("torchvision's", load.torchvision_stem_batches)):
        for batch in () if not count else batches if device == "cpu" else load.batches_on_cuda:
            setting.say(f"ResNet-18, {stem} stem, batch {batch} on {count} processes")
            ranks = run_ranks(resnet_ways, count, device, stem, batch, load.rounds, device=device, timeout=400)
            points.append({"stem": stem, "batch": batch} | ranks[0])
    counts = sorted({2, count} - {0})
    setting.say(f"the source's linear model on up to {counts[-1]} processes")
    on = setting.device_type(counts[-1])
    toy = run_ranks(toy_ways, counts[-1], on, counts, load, device=on, timeout=400)[0]
    whole = (load.workers_of_whole_runs, load.epochs_of_whole_runs, load.global_batch_of_whole_runs)
    found = {"devices": setting.devices, "device": device, "count": count, "points": points}
    return found | {"efficiency": load.efficiency, "toy": toy, "runs": measure_scaling(setting, claim.id, *whole)}


def resnet_ways(rank: int, world_size: int, device: str, stem: str, batch: int, rounds: int) -> dict[str, Any]:
    """Time a step of ResNet-18 on one process, with DDP on all ranks, and on all ranks without communication."""
    place = own_device(rank, device, keep_freed=True)
    images = torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(rank)).to(place)
    labels = torch.arange(batch).remainder(10).to(place)

    def trained(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], None]:
        module = wrap(resnet18(small_input=STEMS[stem]).to(place))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

        def step() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(images), labels).backward()
            optimizer.step()

        return step

    alone, together = trained(lambda model: model), trained(DistributedDataParallel)
    ways = {"1": alone if rank == 0 else lambda: None, f"weak {world_size}": together, f"apart {world_size}": alone}
    samples = {way: batch * (1 if way == "1" else world_size) for way in ways}
    return {"samples": samples, "seconds": timed_rounds(ways, rounds)}


def toy_ways(rank: int, world_size: int, device: str, counts: list[int], load: Any) -> dict[str, Any]:
    """Time epochs of the source's training: its batch for each worker (weak, apart), or in all (strong)."""
    place = own_device(rank, device, keep_freed=True)
    points, whole = load.linear_model_points, load.linear_model_batch
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(points, 1, generator=generator)
    pairs = TensorDataset(x, 2 * x + 3 + 0.1 * torch.randn(points, 1, generator=generator))

    def trained(count: int, batch: int = whole, alone: bool = False) -> Callable[[], None]:
        backend = "nccl" if device == "cuda" else "gloo"
        group = dist.new_group(range(count), backend=backend) if count > 1 and not alone else None
        if rank >= count:
            return lambda: None
        model = linear().to(place)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        module = DistributedDataParallel(model, process_group=group) if group is not None else model
        sampler: DistributedSampler[Any] = DistributedSampler(pairs, count, rank)

        def epoch() -> None:
            total = 0.0
            for inputs, targets in DataLoader(pairs, batch_size=batch, sampler=sampler):
                optimizer.zero_grad()
                found: Tensor = nn.functional.mse_loss(module(inputs.to(place)), targets.to(place))
                found.backward()
                optimizer.step()
                total += found.item()

        return epoch

    ways = {"1": trained(1), f"apart {world_size}": trained(world_size, alone=True)}
    for count in counts:
        ways |= {f"weak {count}": trained(count), f"strong {count}": trained(count, max(1, whole // count))}
    return {"samples": dict.fromkeys(ways, points), "seconds": timed_rounds(ways, load.linear_model_rounds)}


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    count, points = measurements["count"], measurements["points"]
    figures, parts, needed = [], [], measurements["efficiency"] * count
    speeds = [_speed_ups(point) for point in points]
    for point, speed in zip(points, speeds, strict=True):
        name = f"ResNet-18, {point['stem']} stem, batch {point['batch']}"
        weak, apart = f"weak {count}", f"apart {count}"
        parts.append(_part(name, speed[weak], speed[apart], measurements))
        figures.append(speed[weak].figure(f"speed-up of DDP, {count} processes", "x", name, against=needed))
        figures.append(speed[apart].figure(f"the same without communication, {count}", "x", name))
    toy = _speed_ups(measurements["toy"])
    sharing = " on fewer cores" if measurements["devices"] < 2 else ""
    for way, gain in toy.items():
        kind, _, processes = way.partition(" ")
        judged = kind in TOY and int(processes) == count
        if judged:
            parts.append(_part(TOY[kind], gain, toy[f"apart {count}"], measurements))
        name = f"speed-up of the linear model, {way} processes{sharing}"
        figures.append(gain.figure(name, "x", TOY[kind] if judged else "", against=needed if judged else None))
    of_runs, plots = shown(measurements["runs"])
    figures += of_runs
    if not count:
        return missing("two cores or two CUDA devices that can work at the same time", figures, plots)
    names = [f"{point['stem']} {point['batch']}" for point in points]
    lines = [Line(f"{count} times faster", [float(count)] * len(points))]
    lines += [
        line(name, [speed[f"{kind} {count}"] for speed in speeds])
        for kind, name in (("weak", "DDP"), ("apart", "no communication"))
    ]
    title = f"Speed-up of ResNet-18 on {count} processes"
    plot = Series(title, Axis("stem and batch", "", names), Axis("speed-up", "x"), lines)
    measurable = [part for part in parts if part.verdict != "not measurable here"]
    return replace(composed(parts, figures, [plot, *plots]), verdict=composed(measurable or parts).verdict)


def _part(name: str, speed: Interval, apart: Interval, measurements: Measurements) -> Part:
    """The verdict on one part."""
    count, needed = measurements["count"], measurements["efficiency"] * measurements["count"]
    unit = "CUDA devices" if measurements["device"] == "cuda" else "cores"
    said = f"{count} processes are {speed} times as fast, against {needed:.2f} asked for; without communication {apart}"
    verdict: Verdict = "inconclusive"
    if speed.above(count) or apart.above(count):
        said += f": more than {count}, so the single process was slowed down by something else"
    elif speed.above(needed):
        verdict = "confirmed"
    elif speed.below() and apart.above():
        verdict, said = "refuted", f"{said}: slower than one process"
    elif apart.below(needed):
        verdict = "not measurable here"
        said = f"needs {count} {unit} that are free at the same time: {said}"
    elif speed.below(needed) and apart.above(needed):
        verdict = "refuted"
    else:
        said += ": an interval holds the limit; use --full on a quiet machine"
    return Part(name, verdict, said)


def _speed_ups(found: dict[str, Any]) -> dict[str, Interval]:
    """Ratios of the seconds for a sample, by way."""
    each = {way: [taken / found["samples"][way] for taken in seconds] for way, seconds in found["seconds"].items()}
    alone = each.pop("1")
    return {way: ratio_interval(alone, taken) for way, taken in each.items()}

"""Whether communication hides behind backward.

Backward finds the last layers' gradients first. As soon as a bucket of them is complete, DDP starts its all-reduce,
while backward computes the layers before. When backward ends, the step waits only for what is still under way. How much
that saves depends on what does the work. A GPU's links move bytes while its cores compute. With gloo on CPU, the cores
that compute also copy and add the bytes, so what is hidden is the waiting, not the work. Source 000 calls this
"updating parameters during backward", which is not so: the optimizer steps after all gradients are there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_core.model.builders import resnet18
from ddp_core.run.freed_memory import keep_freed_memory
from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, missing
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.framework.statistics import median_interval, ratio_interval
from ddp_lab.claims.measuring.measure import timed_rounds
from ddp_lab.claims.measuring.ranks import own_device, run_ranks
from ddp_lab.records import Axis, Figure, Line, Series

claim = Claim(
    id="C04",
    title="Gradient all-reduce overlaps with backward",
    claim="DDP communicates while backward is still computing, instead of waiting until all gradients are there.",
    original="DDP相对于DP一个重要优化是在反向传播过程中同时进行了参数更新（无需等全部梯度计算完成），"
    "这个过程称为计算与通信的重叠。\n"
    "所以DDP 的做法是一旦某层的梯度算出来,如果不被依赖,就立刻发送同步。",
    sources=("000", "004"),
    method="ResNet-18 at 32x32 in one DDP module whose communication hook is switched in interleaved rounds: "
    "all-reduce each bucket as soon as it is full (DDP's way); keep the buckets and all-reduce the same bytes after "
    "backward; no communication. Hidden share = (after - overlapped) / (after - none).",
    rule="Confirmed when backward first and all-reduce afterwards takes longer than DDP's way beyond noise, refuted "
    "when it is faster beyond noise, else inconclusive. Not measurable with fewer than two cores or CUDA devices.",
    seconds=(15, 45),
)

WAYS = ("overlapped", "after", "none")


def measure(setting: Setting) -> Measurements:
    """Seconds per round and way."""
    count = max((count for count in (2, 4, 8) if count <= setting.devices), default=0)
    measured: dict[str, Any] = {"devices": setting.devices, "ranks": count}
    if count:
        device = setting.device_type(count)
        batch, steps, rounds = (4, 1, setting.choose(35, 101)) if device == "cpu" else (64, 10, 31)
        ranks = run_ranks(time_ways, count, device, batch, steps, rounds, device=device, timeout=300)
        measured |= {"device": device, **ranks[0]}
    return measured


class Switch:
    """What the hook does with a full bucket, and the buckets that wait for the end of backward."""

    way = "overlapped"

    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self.bytes = 0


def hook(switch: Switch, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Send a full bucket now, or keep it for the end of backward."""
    buffer = bucket.buffer()
    buffer.div_(dist.get_world_size())
    if switch.way == "overlapped":
        work = dist.all_reduce(buffer, async_op=True)
        assert work is not None
        sent: torch.futures.Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
        return sent
    switch.kept.append(buffer)
    future: torch.futures.Future[Tensor] = torch.futures.Future(
        devices=[buffer.device] if buffer.device.type == "cuda" else None
    )
    future.set_result(buffer)
    return future


def time_ways(rank: int, world_size: int, device: str, batch: int, steps: int, rounds: int) -> dict[str, Any]:
    """Time the three ways on this rank."""
    place = own_device(rank, device)
    if device == "cpu":
        keep_freed_memory()
    images, labels = torch.randn(batch, 3, 32, 32, device=place), torch.zeros(batch, dtype=torch.long, device=place)
    loss, switch = nn.CrossEntropyLoss(), Switch()
    # The gradients are views of the buckets, so an all-reduce of the buckets after backward is one of the gradients.
    module = DistributedDataParallel(resnet18(small_input=True).to(place), gradient_as_bucket_view=True)
    # torch checks the annotations of a hook, and refuses the strings that this file's future import makes of them.
    module.register_comm_hook(switch, lambda switch, bucket: hook(switch, bucket))

    def run(way: str) -> None:
        switch.way = way
        for _ in range(steps):
            switch.kept.clear()
            module.zero_grad()
            loss(module(images), labels).backward()
            if way == "after":
                for work in [dist.all_reduce(buffer, async_op=True) for buffer in switch.kept]:
                    assert work is not None
                    work.wait()

    seconds = timed_rounds({way: lambda way=way: run(way) for way in WAYS}, rounds, warm_up=2)  # type: ignore[misc]
    sizes = [buffer.numel() * buffer.element_size() for buffer in switch.kept]
    return {"seconds": seconds, "steps": steps, "bucket_bytes": sizes}


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    if measurements["ranks"] < 2:
        return missing("two cores or two CUDA devices that can work at the same time")
    seconds, steps = measurements["seconds"], measurements["steps"]
    rounds = list(zip(*(seconds[way] for way in WAYS), strict=True))
    gain = ratio_interval(seconds["after"], seconds["overlapped"])
    hidden = [100 * (after - overlapped) / (after - none) for overlapped, after, none in rounds if after > none]
    figures = [Figure("after backward / overlapped", gain.value, "x", gain.low, gain.high)]
    if hidden:
        share = median_interval(hidden)
        figures.append(Figure("hidden share of communication", share.value, "%", share.low, share.high))
    for way in WAYS:
        each = median_interval([1000 * taken / steps for taken in seconds[way]])
        figures.append(Figure(f"step, {way}", each.value, "ms", each.low, each.high))
    names = ["overlapped with backward", "after backward", "no communication"]
    plot = Series(
        "Step time by when gradients travel",
        Axis("communication", "", names),
        Axis("step", "ms"),
        [
            Line(
                f"{measurements['ranks']} ranks",
                [figure.value for figure in figures[-3:]],  # type: ignore[misc]
                [figure.low for figure in figures[-3:]],
                [figure.high for figure in figures[-3:]],
            )
        ],
    )
    said = f"with all-reduce after backward a step takes {gain} times as long as with DDP's overlap"
    if hidden:
        said += f"; {min(100, median_interval(hidden).value):.0f} % of the communication is hidden"
    if gain.above_one:
        return Judgement("confirmed", said, figures, [plot])
    if gain.below_one:
        return Judgement("refuted", said, figures, [plot])
    return Judgement("inconclusive", f"{said}: not beyond noise", figures, [plot])

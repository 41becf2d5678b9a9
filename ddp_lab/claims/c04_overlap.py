"""Whether communication hides behind backward.

With gloo over the loopback interface, the cores that compute also copy the bytes, so there is nearly nothing to hide.
So on CPU each rank gets a link of its own, slow enough that a step waits for the link and not for the copying, yet
about as fast as backward.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_core.model.builders import mlp, resnet18
from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, composed, versions
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.framework.statistics import ROUNDS, Interval, line, median_interval, milliseconds, ratio_interval
from ddp_lab.claims.measuring import namespaces
from ddp_lab.claims.measuring.links import on_links
from ddp_lab.claims.measuring.measure import timed_rounds
from ddp_lab.claims.measuring.ranks import own_device, run_ranks
from ddp_lab.records import Axis, Figure, Part, Series, Verdict

claim = Claim(
    id="C04",
    title="Gradient all-reduce overlaps with backward",
    claim="DDP communicates while backward is still computing, instead of waiting until all gradients are there, and "
    "updates the parameters during backward.",
    original="DDP相对于DP一个重要优化是在反向传播过程中同时进行了参数更新（无需等全部梯度计算完成），"
    "这个过程称为计算与通信的重叠。\n"
    "所以DDP 的做法是一旦某层的梯度算出来,如果不被依赖,就立刻发送同步。",
    sources=("000", "004"),
    method="ResNet-18 at 32x32 in one DDP module whose communication hook is switched in interleaved rounds: "
    "all-reduce each bucket as soon as it is full (DDP's way); keep the buckets and all-reduce the same bytes after "
    "backward; no communication; and the all-reduce of these bytes alone. Hidden share = (after - overlapped) / alone. "
    "On CPU two ranks, each in a network namespace with a link of its own rate; the same over the loopback interface "
    "shows how long the cores need for the copying. The parameters: two ranks with a deep network of 40 tensors and "
    "buckets of 20 kB compare them with those before the step, bit by bit, whenever a gradient is there, after "
    "backward, and after the optimizer's step.",
    rule="Two parts. Communication during backward: confirmed when backward first and all-reduce afterwards takes "
    "longer than DDP's way beyond noise, refuted when it is faster beyond noise, else inconclusive; not measurable "
    "without two CUDA devices or two cores and namespaces with links of their own, nor where the all-reduce "
    "alone takes over loopback 20 % or more of its time over the links: then the cores are the limit. Parameters "
    "during backward: confirmed when one changes before backward ends, refuted when all change in the optimizer's step "
    "alone, else inconclusive.",
    in_short="Confirmed where all-reduce after backward takes longer beyond noise; and where a parameter changes "
    "before backward ends.",
    loads={
        "rounds": (ROUNDS[0], 21),
        "rounds_on_loopback": (8, 8),
        "batch": (8, 8),
        "batch_on_cuda": (64, 64),
        "steps": (1, 1),
        "steps_on_cuda": (10, 10),
        "link_mbit_per_second": (1000, 1000),
        "copying_share": (0.2, 0.2),
        "steps_with_parameters_compared": (3, 3),
    },
    history=versions(
        "2026-11-22 fd8f36270cbd9784 On CPU measured over links of their own, where communication takes long enough to "
        "be hidden; before, it went over loopback, where the cores do the copying, and was inconclusive. The "
        "sentence's other half, that parameters are updated during backward, is a part with a verdict of its own.",
        "2026-11-25 bf10c9ba1baea3e4 Beyond noise is the exact sign test with Holm's procedure over all intervals that "
        "bear verdicts, and the rounds follow from it.",
    ),
    seconds=(55, 90),
    tests=1,
)


NAMES = {
    "overlapped": "overlapped with backward",
    "after": "after backward",
    "none": "no communication",
    "alone": "all-reduce alone",
}
DURING, UPDATED = "communicates during backward", "updates the parameters during backward"
LOOKS, CHANGED, STEPPED = "looks during backward", "changed during backward", "changed after step"


def measure(setting: Setting) -> Measurements:
    """Seconds per round and way; and when parameters change."""
    load = claim.load(setting)
    cuda = setting.device_type(2) == "cuda"
    batch, steps = (load.batch_on_cuda, load.steps_on_cuda) if cuda else (load.batch, load.steps)
    measured: dict[str, Any] = {"devices": setting.devices, "steps": steps, "copying_share": load.copying_share}
    if setting.devices >= 2:
        how = (setting.ranks if cuda else 2, load.rounds, load.rounds_on_loopback, load.link_mbit_per_second)
        measured |= on_links(setting, time_ways, *how, batch, steps)
    return measured | {"changes": run_ranks(compare_parameters, 2, load.steps_with_parameters_compared)}


class Switch:
    """What the hook does with a full bucket, and the buckets that wait for the end of backward."""

    way = "overlapped"

    def __init__(self) -> None:
        self.kept: list[Tensor] = []


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
    devices: Any = [buffer.device] if buffer.device.type == "cuda" else None
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    future.set_result(buffer)
    return future


def time_ways(rank: int, world_size: int, device: str, rounds: int, batch: int, steps: int) -> dict[str, Any]:
    """Time the three ways on this rank."""
    place = own_device(rank, device, keep_freed=True)
    images, labels = torch.randn(batch, 3, 32, 32, device=place), torch.zeros(batch, dtype=torch.long, device=place)
    switch = Switch()
    # The gradients are views of the buckets, so an all-reduce of the buckets after backward is one of the gradients.
    module = DistributedDataParallel(resnet18(small_input=True).to(place), gradient_as_bucket_view=True)
    # torch checks the annotations of a hook, and refuses the strings that this file's future import makes of them.
    module.register_comm_hook(switch, lambda switch, bucket: hook(switch, bucket))

    def run(way: str) -> None:
        switch.way = way
        for _ in range(steps):
            switch.kept.clear()
            module.zero_grad()
            nn.functional.cross_entropy(module(images), labels).backward()
            if way == "after":
                send(switch.kept)

    def send(buffers: list[Tensor]) -> None:
        for work in [dist.all_reduce(buffer, async_op=True) for buffer in buffers]:
            assert work is not None
            work.wait()

    # DDP makes its buckets anew after the first step; from then on they stay.
    for _ in range(3):
        run("none")
    buckets = list(switch.kept)
    ways: dict[str, Callable[[], None]] = {way: lambda way=way: run(way) for way in list(NAMES)[:3]}  # type: ignore[misc]
    ways["alone"] = lambda: send(steps * buckets)
    seconds = timed_rounds(ways, rounds, warm_up=2)
    return {"seconds": seconds, "bucket_bytes": [buffer.numel() * buffer.element_size() for buffer in buckets]}


def compare_parameters(rank: int, world_size: int, steps: int) -> dict[str, int]:
    """How often any parameter was found changed: when a gradient was there, after backward, after the optimizer."""
    torch.manual_seed(0)
    module = DistributedDataParallel(mlp([32] * 21), bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    parameters = list(module.parameters())
    before: list[Tensor] = []
    found = {LOOKS: 0, CHANGED: 0, STEPPED: 0, "steps": steps}

    def changed() -> bool:
        return not all(torch.equal(now, then) for now, then in zip(parameters, before, strict=True))

    def look(parameter: Tensor) -> None:
        found[LOOKS] += 1
        found[CHANGED] += changed()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(look)
    for _ in range(steps):
        optimizer.zero_grad()
        before = [parameter.detach().clone() for parameter in parameters]
        module(torch.randn(8, 32)).square().mean().backward()
        look(parameters[0])
        optimizer.step()
        found[STEPPED] += changed()
    return found


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    figures, series, steps = [], [], measurements["steps"]
    overlap = Part(DURING, "not measurable here", "needs two cores or two CUDA devices that work at the same time")
    if measurements["devices"] >= 2:
        judged, unshaped = measurements["judged"], measurements["unshaped"]
        if unshaped:
            figures += _steps(unshaped, steps, " over loopback", "")
        overlap = _overlap(measurements)
        if judged:
            gain = ratio_interval(judged["seconds"]["after"], judged["seconds"]["overlapped"])
            figures.append(gain.figure("after backward / overlapped", "x", DURING, against=1.0))
            figures.append(_hidden(judged).figure("hidden share of communication", "%", DURING, bounds=(-50, 150)))
            figures += _steps(judged, steps, "", DURING)
            each = [milliseconds(judged["seconds"][way], steps) for way in NAMES]
            axis, name = Axis("communication", "", list(NAMES.values())), f"{measurements['ranks']} ranks"
            series.append(Series("Step time by when gradients travel", axis, Axis("step", "ms"), [line(name, each)]))
    names = (LOOKS, CHANGED, STEPPED, "steps")
    looks, during, after, made = (sum(rank[name] for rank in measurements["changes"]) for name in names)
    name = "looks during backward that found a parameter changed"
    figures.append(Figure(name, during, part=UPDATED, bounds=(0, looks)))
    figures.append(Figure("optimizer steps that changed parameters", after, part=UPDATED, bounds=(0, made)))
    verdict: Verdict = "confirmed" if during else "refuted" if looks and after == made else "inconclusive"
    said = f"a parameter had changed in {during} of {looks} looks during backward, in {after} of {made} after a step"
    return composed([overlap, Part(UPDATED, verdict, said)], figures, series)


def _overlap(measurements: Measurements) -> Part:
    judged, unshaped = measurements["judged"], measurements["unshaped"]
    if judged is None:
        return Part(DURING, "not measurable here", f"needs two CUDA devices; or {namespaces.WANTED}")
    seconds = judged["seconds"]
    gain = ratio_interval(seconds["after"], seconds["overlapped"])
    said = f"with all-reduce after backward a step takes {gain} times as long as with DDP's overlap"
    said += f"; {min(100, _hidden(judged).value):.0f} % of the communication is hidden"
    if unshaped:
        share = median(unshaped["seconds"]["alone"]) / median(seconds["alone"])
        said += f"; copying alone takes {100 * share:.0f} % of the communication's time"
        if share >= measurements["copying_share"]:
            return Part(DURING, "not measurable here", f"needs more or faster cores: {said}")
    return Part(DURING, gain.side(), said)


def _hidden(found: dict[str, Any]) -> Interval:
    rounds = zip(*(found["seconds"][way] for way in ("after", "overlapped", "alone")), strict=True)
    return median_interval([100 * (after - overlapped) / alone for after, overlapped, alone in rounds])


def _steps(found: dict[str, Any], steps: int, where: str, part: str) -> list[Figure]:
    seconds = found["seconds"]
    return [milliseconds(seconds[way], steps).figure(f"{name}{where}", "ms", part) for way, name in NAMES.items()]

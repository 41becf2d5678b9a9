"""Whether nn.DataParallel is slower than DistributedDataParallel.

DP drives all replicas from one Python process. Before every forward it copies the weights to each replica; its threads
take turns at the interpreter's lock for everything that is not inside a kernel; after backward it sums the gradients on
one device. DDP has a process per device and sends gradients during backward. For models of many small operations the
lock costs most, for large models the copies and the sum. DP need not be the slower one: over slow links an all-reduce
can cost more than DP's copies through shared memory (on two GPUs without NVLink, DDP has been published as slower, 131
s against 111 s), and on CPU DP's replicas share memory while DDP's ranks talk over sockets.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ddp_core.spec.layout import Layout
from ddp_core.trainers.data_parallel import DataParallelTrainer
from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, missing
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.framework.statistics import median_interval, ratio_interval
from ddp_lab.claims.measuring.measure import timed_rounds
from ddp_lab.claims.measuring.ranks import run_ranks
from ddp_lab.claims.measuring.stepping import Stepper
from ddp_lab.records import Axis, Figure, Line, Series

claim = Claim(
    id="C06",
    title="DP is slower than DDP on as many devices",
    claim="DP, one process with many threads under Python's lock, weights sent out before every forward and gradients "
    "gathered on one device, is slower than DDP.",
    original="因此，对比DDP和DP，可以明确DDP效率优于DP。\n"
    "由于各进程独立更新参数,且更新过程中模型参数保持一致,DDP 在效率和速度上大大优于 DP。",
    sources=("002", "003"),
    method="This project's own trainers, same experiment, same global batch, plain reduction, stepped in interleaved "
    "rounds in the same processes: DP in rank 0 while the others wait, DDP on all. The digits CNN (many small "
    "operations) and ResNet-18 at 32x32. On CPU, DP makes the moves of nn.DataParallel with one thread per replica; "
    "there, the processor time of these threads also tells how long they wait.",
    rule="Confirmed when DP's step takes longer beyond noise on both experiments; refuted when it is shorter beyond "
    "noise on one; else inconclusive. Not measurable with fewer than two cores or CUDA devices.",
    seconds=(60, 120),
)


def measure(setting: Setting) -> Measurements:
    """Seconds per round by experiment and layout."""
    count = max((count for count in (2, 4, 8) if count <= setting.devices), default=0)
    measured: dict[str, Any] = {"devices": setting.devices, "replicas": count, "experiments": {}}
    if not count:
        return measured
    measured["device"] = device = setting.device_type(count)
    for name, steps, rounds in (("digits", 5, setting.choose(121, 241)), ("resnet18", 1, setting.choose(41, 81))):
        setting.say(f"{name} on dp and ddp x {count}")
        ranks = run_ranks(time_layouts, count, device, name, steps, rounds, device=device, timeout=400)
        measured["experiments"][name] = {"steps": steps, "seconds": ranks[0]}
        if device == "cpu":
            (waiting,) = run_ranks(waiting_shares, 1, name, count, 4 * steps)
            measured["experiments"][name]["waiting"] = waiting
    return measured


def time_layouts(rank: int, world_size: int, device: str, name: str, steps: int, rounds: int) -> dict[str, list[float]]:
    """Time the steps of both layouts; only rank 0 makes DP's steps."""
    ddp = Stepper(name, Layout.model_validate({"kind": "ddp", "device": device, "nproc_per_node": world_size}))
    dp = None
    if rank == 0:
        dp = Stepper(name, Layout.model_validate({"kind": "dp", "device": device, "nproc_per_node": world_size}))
    try:
        ways = {"dp": lambda: dp.step(steps) if dp else None, "ddp": lambda: ddp.step(steps)}
        return timed_rounds(ways, rounds, warm_up=2)
    finally:
        ddp.close()
        if dp:
            dp.close()


def waiting_shares(rank: int, world_size: int, name: str, count: int, steps: int) -> dict[str, float]:
    """The share of time in which DP's threads do not run, with one replica and with `count` replicas.

    It compares the wall time of the replicas' forward and backward with the processor time of their threads, which
    share one interpreter's lock.
    """
    shares = {}
    for replicas in (1, count):
        layout = Layout.model_validate({"kind": "dp", "nproc_per_node": replicas})
        with Stepper(name, layout) as stepper:
            assert isinstance(stepper.trainer, DataParallelTrainer)
            stepper.step(2)
            clocks = [Clock(replica.apply) for replica in stepper.trainer.replicas]
            for replica, clock in zip(stepper.trainer.replicas, clocks, strict=True):
                replica.apply = clock  # type: ignore[assignment, method-assign]
            stepper.step(steps)
            shares[str(replicas)] = 1 - sum(clock.running for clock in clocks) / sum(clock.wall for clock in clocks)
    return shares


class Clock:
    """A function that adds up the wall time and the thread's processor time spent in it, in seconds."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.wall = self.running = 0.0

    def __call__(self, *arguments: Any) -> Any:
        wall, running = time.perf_counter(), time.thread_time()
        try:
            return self.function(*arguments)
        finally:
            self.wall += time.perf_counter() - wall
            self.running += time.thread_time() - running


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    if measurements["replicas"] < 2:
        return missing("two cores or two CUDA devices that can work at the same time")
    figures, said, ratios = [], [], []
    layouts: dict[str, list[Any]] = {"dp": [], "ddp": []}
    for name, found in measurements["experiments"].items():
        seconds, steps = found["seconds"], found["steps"]
        ratio = ratio_interval(seconds["dp"], seconds["ddp"])
        ratios.append(ratio)
        figures.append(Figure(f"{name}: step time of DP / DDP", ratio.value, "x", ratio.low, ratio.high))
        said.append(f"{ratio} times DDP's on {name}")
        for layout, kept in layouts.items():
            each = median_interval([1000 * taken / steps for taken in seconds[layout]])
            kept.append(each)
            figures.append(Figure(f"{name}: step, {layout}", each.value, "ms", each.low, each.high))
        for replicas, share in found.get("waiting", {}).items():
            figures.append(
                Figure(f"{name}: share of time that DP's threads wait, {replicas} replicas", 100 * share, "%")
            )
    plot = Series(
        f"Step time on {measurements['replicas']} replicas or ranks",
        Axis("experiment", "", list(measurements["experiments"])),
        Axis("step", "ms"),
        [
            Line(layout, [one.value for one in each], [one.low for one in each], [one.high for one in each])
            for layout, each in layouts.items()
        ],
    )
    reason = f"with {measurements['replicas']} replicas on {measurements['device']} DP's step takes {', '.join(said)}"
    if any(ratio.below_one for ratio in ratios):
        return Judgement("refuted", reason, figures, [plot])
    if all(ratio.above_one for ratio in ratios):
        return Judgement("confirmed", reason, figures, [plot])
    return Judgement("inconclusive", f"{reason}: not beyond noise on every one", figures, [plot])

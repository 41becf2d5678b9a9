"""Whether nn.DataParallel is slower than DistributedDataParallel.

On CPU nn.DataParallel does nothing but call the module, so two stand-ins are measured. One renders its step: replicas
made anew in each step, threads that live for one forward, and one backward, which on CPU runs the replicas one after
the other. The other is what this project trains with as `--layout dp` on CPU: replicas and threads that stay. The
digits CNN is timed in three ways, whole shares, micro-batches, and micro-batches reduced exactly, because each
micro-batch has the threads wait for the interpreter's lock anew. None of it says anything about GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ddp_core.config.layout import Layout
from ddp_core.observe.step import StepBatch
from ddp_core.trainers.data_parallel import DataParallelStrategy
from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, missing, versions
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.framework.statistics import ROUNDS, Interval, line, milliseconds, ratio_interval
from ddp_lab.claims.measuring.measure import timed_rounds
from ddp_lab.claims.measuring.ranks import run_ranks
from ddp_lab.claims.measuring.rendered_data_parallel import RenderedDataParallel
from ddp_lab.claims.measuring.stepping import Stepper
from ddp_lab.records import Axis, Figure, Series

claim = Claim(
    id="C06",
    title="DP is slower than DDP on as many devices",
    claim="DP, one process with many threads under Python's lock, weights sent out before every forward and gradients "
    "gathered on one device, is slower than DDP.",
    original="因此，对比DDP和DP，可以明确DDP效率优于DP。\n"
    "由于各进程独立更新参数,且更新过程中模型参数保持一致,DDP 在效率和速度上大大优于 DP。",
    sources=("002", "003"),
    method="Step time with the same experiment and global batch, plain reduction, in interleaved rounds in the same "
    "processes: DP in rank 0 while the others wait, DDP on all. The digits CNN (many small operations) and ResNet-18 "
    "at 32x32. On CUDA, DP is nn.DataParallel itself. On CPU two stand-ins: nn.DataParallel's step rendered over CPU "
    "replicas that are made anew in each step, and replicas and threads that stay. There also the digits CNN in "
    "micro-batches, plain and exact; and how long the staying threads wait, from their processor time.",
    rule="Confirmed when nn.DataParallel's step takes longer than DDP's beyond noise on both experiments; refuted when "
    "it is shorter beyond noise on one; else inconclusive. Not measurable with fewer than two CUDA devices: stand-ins "
    "are reported and decide nothing.",
    in_short="Confirmed where DP's step takes longer than DDP's beyond noise on digits and ResNet-18; refuted where "
    "it takes less on one.",
    loads={
        "digits_rounds": (15, 61),
        "digits_steps_in_a_round": (5, 5),
        "resnet18_rounds": (ROUNDS[0], 21),
        "resnet18_steps_in_a_round": (1, 1),
        "steps_for_waiting": (20, 20),
    },
    history=versions(
        "2026-11-22 b63a8bd0ec8fcd2b Threads on CPU are no nn.DataParallel, so they give no verdict any more; the "
        "verdict before, refuted, was theirs. A faithful rendering of its step is measured beside them, and the ways "
        "in which C02's whole runs differ from these steps.",
        "2026-11-25 307ba5796f3fa9b7 Beyond noise is the exact sign test with Holm's procedure over all intervals that "
        "bear verdicts, and the rounds follow from it.",
    ),
    seconds=(45, 145),
    tests=2,
)


THREADS, RENDERED = "threads that stay", "nn.DataParallel's step rendered on CPU"
CUTS: dict[str, dict[str, Any]] = {
    "": {},
    ", micro-batches": {"cut": True},
    ", micro-batches, exact": {"cut": True, "reduction": "exact"},
}
"""How an experiment is cut and reduced, by what is appended to the name of a way."""


def measure(setting: Setting) -> Measurements:
    """Seconds per round by experiment and way."""
    load, count = claim.load(setting), setting.ranks
    measured: dict[str, Any] = {"devices": setting.devices, "replicas": count, "experiments": {}}
    if not count:
        return measured
    measured["device"] = device = setting.device_type(count)
    for name in ("digits", "resnet18"):
        setting.say(f"{name} on dp and ddp x {count}")
        steps, rounds = (getattr(load, f"{name}_{what}") for what in ("steps_in_a_round", "rounds"))
        ranks = run_ranks(time_ways, count, device, name, steps, rounds, device=device, timeout=500)
        found = measured["experiments"][name] = {"steps": steps, "seconds": ranks[0]}
        if device == "cpu":
            waited = load.steps_for_waiting // (1 + 4 * (steps == 1))
            (found["waiting"],) = run_ranks(waiting_shares, 1, name, count, waited)
    return measured


def time_ways(rank: int, world_size: int, device: str, name: str, steps: int, rounds: int) -> dict[str, list[float]]:
    """Time the steps of all ways; only rank 0 makes DP's steps."""
    ways: dict[str, Callable[[], Any]] = {}
    with ExitStack() as stack:

        def add(way: str, kind: str, there: bool = True, **how: Any) -> Stepper | None:
            replicas = {} if kind == "single" else {"nproc_per_node": world_size}
            layout = Layout.model_validate({"kind": kind, "device": device} | replicas)
            stepper = stack.enter_context(Stepper(name, layout, **how)) if there else None
            ways[way] = lambda: stepper.step(steps) if stepper else None
            return stepper

        for suffix, how in CUTS.items() if name == "digits" and device == "cpu" else [("", CUTS[""])]:
            add(f"ddp{suffix}", "ddp", **how)
            add(f"dp{suffix}" if device == "cuda" else f"{THREADS}{suffix}", "dp", rank == 0, **how)
        if device == "cpu":
            rendered = add(RENDERED, "single", rank == 0)
            if rendered is not None:
                _render(rendered, world_size)
        return timed_rounds(ways, rounds, warm_up=2)


def _render(stepper: Stepper, count: int) -> None:
    """Let a strategy of one process make nn.DataParallel's step over `count` replicas."""
    strategy = stepper.strategy
    module = RenderedDataParallel(strategy.model, count).train()

    def compute_gradients(batch: StepBatch) -> None:
        for parameter in strategy.model.parameters():
            parameter.grad = None
        ((inputs, targets),) = batch.tensors
        loss = strategy.passes.loss(module, inputs, targets)
        strategy.losses.put(batch.micro_batches[0].index, loss.detach())
        strategy.passes.backward(loss, strategy.passes.loss_weight(batch.divisor))
        strategy.send_losses(batch)

    strategy.compute_gradients = compute_gradients  # type: ignore[method-assign]


def waiting_shares(rank: int, world_size: int, name: str, count: int, steps: int) -> dict[str, float]:
    """The share of time in which DP's threads do not run, with one replica and with `count` replicas.

    It compares the wall time of the replicas' forward and backward with the processor time of their threads, which
    share one interpreter's lock.
    """
    shares = {}
    for replicas in (1, count):
        layout = Layout.model_validate({"kind": "dp", "nproc_per_node": replicas})
        with Stepper(name, layout) as stepper:
            assert isinstance(stepper.strategy, DataParallelStrategy)
            stepper.step(2)
            clocks = [Clock(replica.apply) for replica in stepper.strategy.replicas]
            for replica, clock in zip(stepper.strategy.replicas, clocks, strict=True):
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
            # Both readings of the thread's clock lie between those of the wall clock, so that a thread cannot seem to
            # run longer than the call took.
            self.running += time.thread_time() - running
            self.wall += time.perf_counter() - wall


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    count, experiments = measurements["replicas"], measurements["experiments"]
    if count < 2:
        return missing("two CUDA devices")
    figures: list[Figure] = []
    ratios: dict[str, Interval] = {}
    steps: dict[str, dict[str, Interval]] = {}
    for name, found in experiments.items():
        seconds = found["seconds"]
        for way in seconds:
            if way.startswith("ddp"):
                continue
            ratio = ratio_interval(seconds[way], seconds[f"ddp{_suffix(way)}"])
            text, against = f"{name}: step time of DP / DDP{_suffix(way)}", 1.0 if way == "dp" else None
            figures.append(ratio.figure(text, "x", stand_in=_stand_in(way), against=against))
            if way == "dp":
                ratios[name] = ratio
        for way in seconds:
            each = steps.setdefault(way, {})[name] = milliseconds(seconds[way], found["steps"])
            kind = "ddp" if way.startswith("ddp") else "dp"
            figures.append(each.figure(f"{name}: step, {kind}{_suffix(way)}", "ms", stand_in=_stand_in(way)))
        for replicas, share in found.get("waiting", {}).items():
            text = f"{name}: share of time that DP's threads wait, {replicas} replicas"
            figures.append(Figure(text, 100 * share, "%", stand_in=THREADS, bounds=(0, 100)))
    lines = [line(way, each.values()) for way, each in steps.items() if not _suffix(way)]
    axis, title = Axis("experiment", "", list(experiments)), f"Step time on {count} replicas or ranks"
    plots = [Series(title, axis, Axis("step", "ms"), lines)]
    if not ratios:
        return missing("2 CUDA devices: on CPU nn.DataParallel does nothing but call the module", figures, plots)
    said = ", ".join(f"{ratio} times DDP's on {name}" for name, ratio in ratios.items())
    reason = f"with {count} devices nn.DataParallel's step takes {said}"
    if any(ratio.below() for ratio in ratios.values()):
        return Judgement("refuted", reason, figures, plots)
    if all(ratio.above() for ratio in ratios.values()):
        return Judgement("confirmed", reason, figures, plots)
    return Judgement("inconclusive", f"{reason}: not beyond noise on every one", figures, plots)


def _suffix(way: str) -> str:
    return max((suffix for suffix in CUTS if way.endswith(suffix)), key=len)


def _stand_in(way: str) -> str:
    return next((name for name in (THREADS, RENDERED) if way.startswith(name)), "")

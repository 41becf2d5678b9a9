"""Whether DP's main device carries more than the others.

The loss is computed inside the replicas here, so less is gathered, and the difference is mostly the optimizer's state.
On CPU all replicas share one memory and any core may run any thread: there is no main device to compare.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ddp_core.config.layout import Layout
from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, missing, versions
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.measuring.ranks import run_ranks
from ddp_lab.claims.measuring.stepping import Stepper
from ddp_lab.records import Axis, Figure, Line, Series

claim = Claim(
    id="C07",
    title="Under DP the main device carries more memory and work",
    claim="Under DP the main GPU carries more memory and work than the others, under DDP all carry the same.",
    original="DP模型的另一个缺点就是master节点的负载很重，因为把损失和损失相对于最后一层的梯度计算都放在了master节点上。\n"
    "由于梯度的计算和模型参数的更新都是在主 GPU 上完成的,主 GPU 的负载会显著增加,导致 GPU 资源无法得到充分利用。",
    sources=("002", "003"),
    method="ResNet-18 with momentum, this project's trainers: peak memory that torch allocated on each device (reset "
    "after warm-up), and the seconds of kernels on each device from the profiler over the same steps; DP in one "
    "process, DDP in one per device.",
    rule="Confirmed when under DP the first device has the highest peak memory and the most kernel time, and max/mean "
    "over the devices is higher under DP than under DDP for both; refuted when neither holds, else inconclusive. Not "
    "measurable with fewer than two CUDA devices.",
    in_short="Confirmed where under DP the first device has the most memory and kernel time, both less evenly shared "
    "than under DDP.",
    loads={"steps": (10, 50), "samples_per_device": (64, 64), "first_steps": (3, 3)},
    history=versions("2026-11-22 255af1f37511a3d9 The first version with stated loads; the rule is the one before."),
    seconds=(1, 60),
)


QUANTITIES = {"memory": ("peak memory", "MB", 1e-6), "busy": ("kernel time", "s", 1.0)}


def measure(setting: Setting) -> Measurements:
    """Peak memory in bytes and seconds of kernels, by layout and device."""
    measured: dict[str, Any] = {"cuda_devices": setting.cuda_devices}
    if setting.cuda_devices < 2:
        return measured
    load, count = claim.load(setting), setting.ranks
    how = (load.samples_per_device, load.first_steps, load.steps)
    (dp,) = run_ranks(observe, 1, "dp", count, *how, device="cuda", timeout=300)
    ranks = run_ranks(observe, count, "ddp", count, *how, device="cuda", timeout=300)
    ddp = {name: [rank[name][0] for rank in ranks] for name in QUANTITIES}
    return measured | {"steps": load.steps, "layouts": {"dp": dp, "ddp": ddp}}


def observe(
    rank: int, world_size: int, kind: str, count: int, samples: int, first: int, steps: int
) -> dict[str, list[float]]:
    """Memory and kernel time of the devices of this process: all of them under DP, one under DDP."""
    layout = Layout.model_validate({"kind": kind, "device": "cuda", "nproc_per_node": count})
    devices = list(range(count)) if kind == "dp" else [rank]
    with Stepper("resnet18", layout, [f"global_batch_size={samples * layout.shares}"]) as stepper:
        stepper.step(first)
        for device in devices:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            stepper.step(steps)
            for device in devices:
                torch.cuda.synchronize(device)
        busy = dict.fromkeys(devices, 0.0)
        for event in profiler.events() or ():
            # Waiting for peers inside an all-reduce is not work.
            is_kernel = event.device_type == DeviceType.CUDA and not event.is_user_annotation
            if is_kernel and event.device_index in busy and "nccl" not in event.name.lower():
                busy[event.device_index] += event.time_range.elapsed_us() * 1e-6
        memory = [float(torch.cuda.max_memory_allocated(device)) for device in devices]
        return {"memory": memory, "busy": list(busy.values())}


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    layouts = measurements.get("layouts")
    if layouts is None:
        found = measurements["cuda_devices"]
        return missing(f"2 CUDA devices, found {found}: on CPU the threads of DP share one memory and all cores")
    figures, series, holds, said = [], [], [], []
    for name, (title, unit, scale) in QUANTITIES.items():
        spread = {layout: max(each[name]) / (sum(each[name]) / len(each[name])) for layout, each in layouts.items()}
        figures += [
            Figure(f"{title}, max/mean over devices, {layout}", value, "x", bounds=(1, len(layouts[layout][name])))
            for layout, value in spread.items()
        ]
        first = layouts["dp"][name][0] == max(layouts["dp"][name])
        holds.append(first and spread["dp"] > spread["ddp"])
        said.append(f"{title} max/mean {spread['dp']:.2f} under DP and {spread['ddp']:.2f} under DDP")
        devices = [str(number) for number in range(len(layouts["dp"][name]))]
        lines = [Line(layout, [scale * value for value in values[name]]) for layout, values in layouts.items()]
        series.append(Series(f"{title.capitalize()} per device", Axis("device", "", devices), Axis(title, unit), lines))
    verdict = "confirmed" if all(holds) else "inconclusive" if any(holds) else "refuted"
    return Judgement(verdict, "; ".join(said), figures, series)  # type: ignore[arg-type]

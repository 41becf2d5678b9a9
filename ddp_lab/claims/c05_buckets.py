"""Why gradients travel in buckets.

Each all-reduce costs a fixed time (a round of messages, some bookkeeping) and a time per byte. Sent one by one, the
many small tensors of a network (biases, batch-norm weights) pay the fixed time each; in buckets they share it. With one
bucket for everything nothing could be sent before backward ends. 25 MB is DDP's compromise, and the curve is flat
around it. How much buckets gain depends on how many small tensors there are, and on how long the layers compute
meanwhile.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_core.model.builders import mlp, resnet18
from ddp_core.run.freed_memory import keep_freed_memory
from ddp_core.torch_internals import ddp_facts
from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, missing
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.framework.statistics import median_interval, ratio_interval
from ddp_lab.claims.measuring.measure import timed_rounds
from ddp_lab.claims.measuring.ranks import own_device, run_ranks
from ddp_lab.records import Axis, Figure, Line, Series

claim = Claim(
    id="C05",
    title="Sending gradients in buckets is faster than one by one",
    claim="DDP packs gradients into buckets (25 MB by default), because sending many small packets is slow.",
    original="为了避免频繁发送小包导致网络拥塞,DDP 会将梯度打包进 Bucket(默认 25MB)。\n"
    "这种批量处理大幅降低了通信开销。",
    sources=("004",),
    method="Step time of DDP with bucket_cap_mb 0.1 to 100, against a bucket_cap_mb of one byte, so that DDP sends "
    "each gradient on its own as soon as it is there. The same is also done by hand, with one all-reduce in each "
    "parameter's hook. In interleaved rounds, on ResNet-18 at 32x32 (62 tensors, 45 MB) and a deep, narrow network "
    "(200 tensors, 0.4 MB).",
    rule="Judged on both networks, the fastest bucket size against DDP's one by one: confirmed when buckets are faster "
    "beyond noise on at least one and slower beyond noise on none; refuted when they are slower beyond noise on one; "
    "else inconclusive. Not measurable with fewer than two cores or CUDA devices.",
    seconds=(25, 90),
)

ONE_BY_ONE, BY_HAND = "one by one", "by hand"
ONE_BYTE = 1 / 2**20


def measure(setting: Setting) -> Measurements:
    """Seconds per round by network and way of sending."""
    count = max((count for count in (2, 4, 8) if count <= setting.devices), default=0)
    measured: dict[str, Any] = {"devices": setting.devices, "ranks": count, "networks": {}}
    if not count:
        return measured
    device = setting.device_type(count)
    for network, steps, rounds in (("narrow", 5, setting.choose(21, 51)), ("resnet18", 1, setting.choose(15, 41))):
        setting.say(f"{network} on {count} ranks")
        sizes = setting.choose((0.1, 1.0, 25.0, 100.0), (0.1, 1.0, 5.0, 25.0, 50.0, 100.0))
        ranks = run_ranks(time_ways, count, device, network, sizes, steps, rounds, device=device, timeout=300)
        measured["networks"][network] = {"steps": steps, **ranks[0]}
    return measured


def time_ways(
    rank: int, world_size: int, device: str, network: str, sizes: tuple[float, ...], steps: int, rounds: int
) -> dict[str, Any]:
    """Time every bucket size, and one by one, on this rank."""
    place = own_device(rank, device)
    if device == "cpu":
        keep_freed_memory()
    torch.manual_seed(0)
    if network == "resnet18":
        model, inputs = resnet18(small_input=True), torch.randn(2, 3, 32, 32)
    else:
        model, inputs = mlp([32] * 101), torch.randn(8, 32)
    model, inputs = model.to(place), inputs.to(place)
    ways: dict[str, Callable[[], None]] = {}
    modules = {}
    for name, size in [(ONE_BY_ONE, ONE_BYTE), *((f"{size:g} MB", size) for size in sizes)]:
        # Buffers travel apart from the buckets, so their broadcast would only add time.
        module = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=size, broadcast_buffers=False)
        modules[name], ways[name] = module, _steps(module, inputs, steps)
    ways[BY_HAND] = _steps(OneByOne(copy.deepcopy(model)), inputs, steps)
    seconds = timed_rounds(ways, rounds, warm_up=2)
    tensors = len(list(model.parameters()))
    messages = {name: _messages(module) for name, module in modules.items()} | {BY_HAND: tensors}
    return {"tensors": tensors, "messages": messages, "seconds": seconds}


def _messages(module: DistributedDataParallel) -> int:
    """How many buckets DDP really makes; it rebuilds them after the first step."""
    facts = ddp_facts(module)
    sizes = facts.get("rebuilt_bucket_sizes") or facts["bucket_sizes"]
    return len(str(sizes).split(","))


def _steps(module: nn.Module, inputs: Tensor, steps: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(steps):
            module.zero_grad()
            module(inputs).square().mean().backward()
            if isinstance(module, OneByOne):
                module.wait()

    return run


class OneByOne(nn.Module):
    """Data parallelism without buckets: each gradient is all-reduced on its own, as soon as it is there."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._under_way: list[dist.Work] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._send)

    def forward(self, inputs: Tensor) -> Tensor:
        """The model's own forward."""
        outputs: Tensor = self.model(inputs)
        return outputs

    def wait(self) -> None:
        """Wait until every gradient is the mean over the ranks."""
        for work in self._under_way:
            work.wait()
        self._under_way.clear()

    def _send(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.div_(dist.get_world_size())
        work = dist.all_reduce(parameter.grad, async_op=True)
        assert work is not None
        self._under_way.append(work)


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    if measurements["ranks"] < 2:
        return missing("two cores or two CUDA devices that can work at the same time")
    figures, series, said, outcomes = [], [], [], []
    for network, found in measurements["networks"].items():
        seconds, steps = found["seconds"], found["steps"]
        each = {way: median_interval([1000 * taken / steps for taken in rounds]) for way, rounds in seconds.items()}
        best = min((way for way in each if way.endswith(" MB")), key=lambda way: each[way].value)
        gain = ratio_interval(seconds[ONE_BY_ONE], seconds[best])
        figures.append(Figure(f"{network}: one by one / buckets of {best}", gain.value, "x", gain.low, gain.high))
        figures += [
            Figure(f"{network}: step, {way}, {found['messages'][way]} messages", one.value, "ms", one.low, one.high)
            for way, one in each.items()
        ]
        said.append(
            f"sent one by one a step of {network} takes {gain} times as long as with buckets of {best} "
            f"({found['messages'][ONE_BY_ONE]} messages against {found['messages'][best]})"
        )
        outcomes.append(gain)
        series.append(
            Series(
                f"Step time by bucket size, {network}",
                Axis("bucket_cap_mb", "", list(each)),
                Axis("step", "ms"),
                [
                    Line(
                        f"{measurements['ranks']} ranks",
                        [one.value for one in each.values()],
                        [one.low for one in each.values()],
                        [one.high for one in each.values()],
                    )
                ],
            )
        )
    reason = "; ".join(said)
    if any(gain.below_one for gain in outcomes):
        return Judgement("refuted", reason, figures, series)
    if any(gain.above_one for gain in outcomes):
        return Judgement("confirmed", reason, figures, series)
    return Judgement("inconclusive", f"{reason}: not beyond noise", figures, series)

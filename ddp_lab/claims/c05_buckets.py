"""Why gradients travel in buckets.

Each all-reduce costs a fixed time and a time per byte. Sent one by one, the many small tensors of a network pay the
fixed time each; in buckets they share it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_core.base.torch_internals import ddp_facts
from ddp_core.model.builders import mlp, resnet18
from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, composed, holds, versions
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.framework.statistics import ROUNDS, line, milliseconds, ratio_interval
from ddp_lab.claims.measuring.measure import timed_rounds
from ddp_lab.claims.measuring.ranks import own_device, run_ranks
from ddp_lab.records import Axis, Figure, Part, Series

claim = Claim(
    id="C05",
    title="Sending gradients in buckets is faster than one by one",
    claim="DDP packs gradients into buckets (25 MB by default), because sending many small packets is slow.",
    original="为了避免频繁发送小包导致网络拥塞,DDP 会将梯度打包进 Bucket(默认 25MB)。\n"
    "这种批量处理大幅降低了通信开销。",
    sources=("004",),
    method="Step time of DDP with its default bucket_cap_mb of 25, against a bucket_cap_mb of one byte, so that DDP "
    "sends each gradient on its own as soon as it is there. Other sizes are measured too, and the same by hand, with "
    "one all-reduce in each parameter's hook. In interleaved rounds, on a deep, narrow network (200 tensors, 0.4 MB) "
    "and ResNet-18 at 32x32 (62 tensors, 45 MB). The default is read from DDP itself.",
    rule="Three parts. The default: confirmed when a DDP module made without bucket_cap_mb says that its buckets hold "
    "25 MB (MiB), else refuted. Each network: confirmed when a step with one message per gradient takes longer than "
    "with buckets of 25 MB beyond noise, refuted when it takes less, else inconclusive; not measurable with fewer than "
    "two cores or CUDA devices. Confirmed or refuted, it is called marginal where the nearer end of the interval is "
    "within the margin of 1. The other sizes are reported.",
    in_short="Confirmed where the default is 25 MB, and where a message per gradient makes a step longer beyond noise.",
    loads={
        "narrow_rounds": (15, 51),
        "narrow_steps_in_a_round": (5, 5),
        "resnet18_rounds": (ROUNDS[0], 31),
        "resnet18_steps_in_a_round": (1, 1),
        "bucket_cap_mb": ((1.0, 25.0), (0.1, 1.0, 5.0, 25.0, 50.0, 100.0)),
        "default_mb": (25.0, 25.0),
        "margin": (0.01, 0.01),
    },
    history=versions(
        "2026-11-22 3901e3629b88aa20 The default of 25 MB is judged, not the fastest of several sizes, which is chosen "
        "by the same measurements; and each network is a part, so that the page tells where buckets gain.",
        "2026-11-25 aa8fa3ec91394907 A difference whose interval ends within 1 % of 1 is called marginal. Beyond noise "
        "is the exact sign test with Holm's procedure over all intervals that bear verdicts, and the rounds follow "
        "from it.",
    ),
    seconds=(25, 200),
    tests=2,
)


ONE_BY_ONE, BY_HAND = "one by one", "by hand"
ONE_BYTE = 1 / 2**20
NETWORKS = {"narrow": "many small gradients (narrow network)", "resnet18": "few large gradients (ResNet-18)"}


def measure(setting: Setting) -> Measurements:
    """Seconds per round by network and way of sending."""
    load, count, networks = claim.load(setting), setting.ranks, {}
    device = setting.device_type(count)
    for network in NETWORKS if count else ():
        setting.say(f"{network} on {count} ranks")
        steps, rounds = (getattr(load, f"{network}_{what}") for what in ("steps_in_a_round", "rounds"))
        arguments = (device, network, load.bucket_cap_mb, steps, rounds)
        networks[network] = {"steps": steps, **run_ranks(time_ways, count, *arguments, device=device, timeout=300)[0]}
    found = {"devices": setting.devices, "ranks": count, "networks": networks, "margin": load.margin}
    return found | {"default": load.default_mb, "found_default": run_ranks(default_bucket, 1)[0]}


def default_bucket(rank: int, world_size: int) -> float:
    """Megabytes (MiB) that a bucket holds by default, as DDP says."""
    return float(ddp_facts(DistributedDataParallel(mlp([2, 2])))["bucket_cap_bytes"]) / 2**20


def time_ways(
    rank: int, world_size: int, device: str, network: str, sizes: tuple[float, ...], steps: int, rounds: int
) -> dict[str, Any]:
    """Time every bucket size, and one by one, on this rank."""
    place = own_device(rank, device, keep_freed=True)
    torch.manual_seed(0)
    if network == "resnet18":
        model, inputs = resnet18(small_input=True), torch.randn(2, 3, 32, 32)
    else:
        model, inputs = mlp([32] * 101), torch.randn(8, 32)
    model, inputs = model.to(place), inputs.to(place)
    ways: dict[str, Callable[[], None]] = {}
    modules = {}
    for name, size in [(ONE_BY_ONE, ONE_BYTE), *((_name(size), size) for size in sizes)]:
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
    return len(str(facts.get("rebuilt_bucket_sizes") or facts["bucket_sizes"]).split(","))


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
        self._under_way: list[Any] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._send)

    def forward(self, inputs: Tensor) -> Any:
        """The model's own forward."""
        return self.model(inputs)

    def wait(self) -> None:
        """Wait until every gradient is the mean over the ranks."""
        for work in self._under_way:
            work.wait()
        self._under_way.clear()

    def _send(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.div_(dist.get_world_size())
        self._under_way.append(dist.all_reduce(parameter.grad, async_op=True))


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    default, found_default = measurements["default"], measurements["found_default"]
    same = f"buckets of {default:g} MB by default"
    parts = [holds(same, found_default == default, f"DDP says {found_default:g} MB")]
    figures, series = [Figure("bucket by default", found_default, "MB", part=same)], []
    for network, name in NETWORKS.items():
        found = measurements["networks"].get(network)
        if found is None:
            needs = "needs two cores or two CUDA devices that can work at the same time"
            parts.append(Part(name, "not measurable here", needs))
            continue
        seconds, messages, buckets = found["seconds"], found["messages"], _name(default)
        each = {way: milliseconds(rounds, found["steps"]) for way, rounds in seconds.items()}
        gain = ratio_interval(seconds[ONE_BY_ONE], seconds[buckets])
        figures.append(gain.figure(f"one by one / buckets of {buckets}", "x", name, against=1.0))
        figures += [one.figure(f"step, {way}, {messages[way]} messages", "ms", name) for way, one in each.items()]
        said = f"sent one by one a step takes {gain} times as long as with buckets of {buckets} "
        said += f"({messages[ONE_BY_ONE]} messages against {messages[buckets]})"
        nearer = min(abs(gain.low - 1), abs(gain.high - 1))
        if gain.side() != "inconclusive" and nearer <= measurements["margin"]:
            said += f": marginal, the interval ends {100 * nearer:.2g} % from 1"
        parts.append(Part(name, gain.side(), said))
        lines, title = [line(f"{measurements['ranks']} ranks", each.values())], f"Step time by bucket size, {network}"
        series.append(Series(title, Axis("bucket_cap_mb", "", list(each)), Axis("step", "ms"), lines))
    return composed(parts, figures, series)


def _name(size: float) -> str:
    return f"{size:g} MB"

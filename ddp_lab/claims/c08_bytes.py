"""What travels in each step, counted.

In a ring the ranks together send 2 (W - 1) N bytes of gradients, and DDP broadcasts its buffers. The kernel counts what
DDP's connections carry, on CPU as on any network. The bytes of nn.DataParallel exist on CUDA alone: there they are
counted in the two functions through which its replicate and its reduction send everything. On CPU the moves of this
project's replicas are reported as a stand-in. How much passes the main device is not judged: torch adds up gradients
with NCCL where it can, and then they do not all pass it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import comm

from ddp_core.base.torch_internals import MOVES, TorchDispatchMode
from ddp_core.config.layout import Layout
from ddp_core.trainers.data_parallel import DataParallelStrategy
from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, composed, holds, versions
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.measuring.ranks import run_ranks
from ddp_lab.claims.measuring.stepping import Stepper
from ddp_lab.claims.measuring.wire import bytes_moved, can_count
from ddp_lab.records import Axis, Figure, Line, Part, Series

claim = Claim(
    id="C08",
    title="DDP moves gradients, DP moves weights and gradients",
    claim="DDP moves only gradients; DP moves weights and gradients in every step.",
    original="每个进程的模型参数在整个训练过程中保持一致,避免了 DP 中由于参数广播导致的通信开销。\n"
    "更新模型参数时只需要同步梯度而非整个模型,通信开销较小,性能大幅提升。\n"
    "DP 在每个 batch 中需要在 GPU 之间传递模型参数和数据,参数更新时也需要将梯度传递回主 GPU,这会造成大量的通信开销。",
    sources=("003",),
    method="Bytes per step of the digits CNN. DDP: payload bytes that the kernel counted on each rank's connections, "
    "against the theory: each rank sends 2 (W - 1) / W of the gradients' bytes, and rank 0's buffers go to W - 1 "
    "ranks. nn.DataParallel: bytes that its replicate and its reduction send to other devices, counted on CUDA. On "
    "CPU, as a stand-in, the bytes of the tensors that this project's replicas copy or add in the same moves, one by "
    "one or many in one call.",
    rule="Two parts. DDP moves gradients and no weights: confirmed when at every number of ranks its bytes are those "
    "of gradients and buffers in theory within 5 % (the weights would add a third or more), else refuted; not "
    "measurable where the kernel does not count. DP moves weights and gradients: confirmed when nn.DataParallel sends, "
    "in every step, the weights and as many bytes of gradients to or from each further device, else refuted; not "
    "measurable with fewer than two CUDA devices.",
    in_short="Confirmed where DDP's bytes are within 5 % of those of gradients and buffers; and where DP sends weights"
    " and gradients to each further device.",
    loads={
        "ranks": ((2, 4), (2, 3, 4, 8)),
        "steps": (10, 10),
        "samples_per_rank": (16, 16),
        "off_by_at_most": (0.05, 0.05),
    },
    history=versions(
        "2026-11-22 f47ebcfff943e047 Judged in two parts, each by what can be counted: replicas that share the CPU's "
        "memory are a stand-in for nn.DataParallel and decide nothing, and the bytes through its main device are not "
        "judged any more.",
        "2026-11-25 e1c77f0712c7e284 Of the stand-in, tensors that are copied or added many in one call are counted, "
        "too: before, it was shown as moving 0 MB.",
    ),
    seconds=(20, 20),
)


DDP_HALF, DP_HALF = "a step of DDP moves gradients and no weights", "DP moves weights and gradients in every step"
STAND_IN = "replicas in one memory"
MOVED = {"weights and buffers": "weights", "gradients": "gradients", "batch": "batch"}


def measure(setting: Setting) -> Measurements:
    """Bytes per step, by number of devices. They may be more than the cores: bytes do not depend on speed."""
    load, by_devices, cuda = claim.load(setting), {}, None
    how = (load.samples_per_rank, load.steps)
    for count in load.ranks if can_count() else ():
        setting.say(f"counting on {count} devices")
        ranks = run_ranks(count_ddp, count, *how)
        by_devices[str(count)] = {"ddp": ranks, "replicas": run_ranks(count_replicas, 1, count, *how)[0]}
    if setting.cuda_devices > 1:
        (cuda,) = run_ranks(count_dp, 1, setting.cuda_devices, *how, device="cuda")
    found = {"countable": can_count(), "off_by_at_most": load.off_by_at_most, "by_devices": by_devices}
    return found | {"cuda_devices": setting.cuda_devices, "cuda": cuda}


def _stepper(kind: str, devices: int, samples: int, device: str = "cpu") -> Stepper:
    layout = Layout.model_validate({"kind": kind, "device": device, "nproc_per_node": devices})
    return Stepper("digits", layout, [f"global_batch_size={samples * devices}"])


def count_ddp(rank: int, world_size: int, samples: int, steps: int) -> dict[str, float]:
    """What the kernel says this rank sent and received, per step."""
    with _stepper("ddp", world_size, samples) as stepper:
        stepper.step(3)
        dist.all_reduce(torch.zeros(1))
        before = bytes_moved()
        stepper.step(steps)
        sent, received = (after - then for after, then in zip(bytes_moved(), before, strict=True))
        model = stepper.strategy.model
        gradients = _size(parameter.grad for parameter in model.parameters())
        moved = {"sent": sent / steps, "received": received / steps}
        return moved | {"gradients": gradients, "buffers": _size(model.buffers())}


def count_dp(rank: int, world_size: int, count: int, samples: int, steps: int) -> dict[str, float]:
    """Bytes per step that nn.DataParallel sends to and from each further device: weights and buffers, gradients."""
    moved = {"weights": 0, "gradients": 0}

    def broadcast(tensors: Any, devices: Any, *more: Any) -> Any:
        moved["weights"] += (len(devices) - 1) * _size(tensors)
        return sends(tensors, devices, *more)  # type: ignore[no-untyped-call]

    def reduce(lists: Any, *more: Any) -> Any:
        moved["gradients"] += sum(_size(tensors) for tensors in lists[1:])
        return reduces(lists, *more)  # type: ignore[no-untyped-call]

    with _stepper("dp", count, samples, "cuda") as stepper:
        stepper.step(1)
        sends, reduces = comm.broadcast_coalesced, comm.reduce_add_coalesced
        comm.broadcast_coalesced, comm.reduce_add_coalesced = broadcast, reduce
        try:
            stepper.step(steps)
        finally:
            comm.broadcast_coalesced, comm.reduce_add_coalesced = sends, reduces
        per_step = {move: total / steps for move, total in moved.items()}
        return per_step | {"devices": count, "parameters": _size(stepper.strategy.model.parameters())}


def count_replicas(rank: int, world_size: int, count: int, samples: int, steps: int) -> dict[str, float]:
    """What one process copies between its replicas on CPU, in bytes per step, by kind of move."""
    with _stepper("dp", count, samples) as stepper:
        strategy = stepper.strategy
        assert isinstance(strategy, DataParallelStrategy)
        stepper.step(1)
        moved = {"weights": 0, "gradients": 0, "batch": 0}

        def counting(move: str, function: Any) -> Any:
            def counted(*arguments: Any) -> Any:
                with MovedBytes() as moves:
                    result = function(*arguments)
                moved[move] += moves.bytes
                return result

            return counted

        def scattered(batch: Any) -> Any:
            shares = scatter(batch)
            # On devices of their own, all but the first share would be copied.
            moved["batch"] += sum(_size(pair) for share in shares[1:] for pair in share.tensors)
            return shares

        scatter = strategy._scatter
        strategy._scatter = scattered  # type: ignore[method-assign]
        strategy._reduce = counting("gradients", strategy._reduce)  # type: ignore[method-assign]
        for replica in strategy.replicas[1:]:
            replica.copy_from = counting("weights", replica.copy_from)  # type: ignore[method-assign]
        stepper.step(steps)
        model = strategy.model
        known = {"parameters": _size(model.parameters()), "buffers": _size(model.buffers())}
        return {move: total / steps for move, total in moved.items()} | known


class MovedBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are copied into, or added to, others, one by one or many in one call."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in MOVES:
            self.bytes += _size(args[1] if isinstance(args[1], list | tuple) else [args[1]])
        return func(*args, **(kwargs or {}))


def _size(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor))


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    figures, totals, by_devices = [], [], measurements["by_devices"]
    for text, found in by_devices.items():
        counted, theory = _of_ddp(found["ddp"])
        replicas, others = found["replicas"], int(text) - 1
        weights = others * replicas["parameters"]
        known = {"weights": weights + others * replicas["buffers"], "gradients": weights}
        # Copies can differ from theory by rounding only; on the wire there is also what the protocol adds.
        bounds = {move: (0.999 * size / 1e6, 1.001 * size / 1e6) for move, size in known.items()}
        sent = (0.999 * theory / 1e6, 2 * theory / 1e6)
        figures.append(Figure(f"x {text}: sent by all ranks, counted", counted / 1e6, "MB", part=DDP_HALF, bounds=sent))
        figures.append(Figure(f"x {text}: gradients and buffers in theory", theory / 1e6, "MB", part=DDP_HALF))
        for name, move in MOVED.items():
            how: dict[str, Any] = {"part": DP_HALF, "stand_in": STAND_IN, "bounds": bounds.get(move)}
            figures.append(Figure(f"x {text}: {name}", replicas[move] / 1e6, "MB", **how))
        totals.append([value / 1e6 for value in (counted, theory, sum(replicas[move] for move in MOVED.values()))])
    names = ("DDP, counted", "DDP in theory", f"DP ({STAND_IN})")
    lines = [Line(name, [each[number] for each in totals]) for number, name in enumerate(names)]
    axis = Axis("devices", "", list(by_devices))
    plot = Series("Bytes per step, all devices together", axis, Axis("bytes", "MB"), lines)
    return composed([_ddp_part(measurements), _dp_part(measurements, figures)], figures, [plot])


def _of_ddp(ranks: list[dict[str, float]]) -> tuple[float, float]:
    """Bytes per step that all ranks sent, as counted and in theory."""
    theory = (len(ranks) - 1) * (2 * ranks[0]["gradients"] + ranks[0]["buffers"])
    return sum(rank["sent"] for rank in ranks), theory


def _ddp_part(measurements: Measurements) -> Part:
    if not measurements["countable"]:
        return Part(DDP_HALF, "not measurable here", "needs Linux, whose kernel counts the bytes of each connection")
    ratios = {}
    for count, found in measurements["by_devices"].items():
        counted, theory = _of_ddp(found["ddp"])
        ratios[count] = counted / theory
    off = max(abs(ratio - 1) for ratio in ratios.values())
    first = next(iter(measurements["by_devices"].values()))["ddp"][0]
    weights = first["gradients"] / (2 * first["gradients"] + first["buffers"])
    said = f"its bytes are at most {100 * off:.1f} % off those of gradients and buffers, with {', '.join(ratios)} ranks"
    said += f"; sending the weights, too, would add {100 * weights:.0f} %"
    return holds(DDP_HALF, off <= measurements["off_by_at_most"], said)


def _dp_part(measurements: Measurements, figures: list[Figure]) -> Part:
    found = measurements["cuda"]
    if found is None:
        return Part(DP_HALF, "not measurable here", f"needs 2 CUDA devices, found {measurements['cuda_devices']}")
    least, weights, gradients = (found["devices"] - 1) * found["parameters"], found["weights"], found["gradients"]
    figures += [Figure(move, found[move] / 1e6, "MB", part=DP_HALF) for move in ("weights", "gradients")]
    said = f"on {found['devices']} devices it sends {weights / 1e6:.3f} MB of weights and buffers and "
    said += f"{gradients / 1e6:.3f} MB of gradients; one copy each is {least / 1e6:.3f}"
    return holds(DP_HALF, min(weights, gradients) >= least, said)

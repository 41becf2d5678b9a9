"""What travels in each step, counted.

DDP all-reduces the gradients, N bytes, in a ring: each of W ranks sends 2 (W - 1) / W N bytes, all of them together
2 (W - 1) N. (It also broadcasts the buffers, which the sources forget.) DP copies the weights to W - 1 replicas and
adds up W - 1 sets of gradients: 2 (W - 1) N as well, and the batch's shares on top. So the totals are almost the same;
what differs is where they pass. All of DP's bytes go through the one main device, one after the other, before forward
and after backward, while in DDP every rank carries an equal part that does not grow with W, and sends it during
backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_core.spec.layout import Layout
from ddp_core.torch_internals import TorchDispatchMode
from ddp_core.trainers.data_parallel import DataParallelTrainer
from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, missing
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.measuring.ranks import run_ranks
from ddp_lab.claims.measuring.stepping import Stepper
from ddp_lab.claims.measuring.wire import bytes_moved, can_count
from ddp_lab.records import Axis, Figure, Line, Series

claim = Claim(
    id="C08",
    title="DDP moves gradients, DP moves weights and gradients",
    claim="DDP moves only gradients; DP moves weights and gradients in every step.",
    original="每个进程的模型参数在整个训练过程中保持一致,避免了 DP 中由于参数广播导致的通信开销。\n"
    "更新模型参数时只需要同步梯度而非整个模型,通信开销较小,性能大幅提升。\n"
    "DP 在每个 batch 中需要在 GPU 之间传递模型参数和数据,参数更新时也需要将梯度传递回主 GPU,这会造成大量的通信开销。",
    sources=("003",),
    method="Bytes per step of the digits CNN. DDP: payload bytes that the kernel counted on each rank's connections, "
    "against the theory, 2 (W - 1) / W N per rank. DP: bytes of the tensors that scatter, replicate and reduce copy or "
    "add, counted while they run (on CPU, with nn.DataParallel's moves over replicas; the sizes are the same on CUDA).",
    rule="Confirmed when at every number of devices DP moves the weights in each step and DDP's bytes are those "
    "of gradients and buffers in theory within 5 % (so no weights), and at the largest over 5 % more bytes "
    "pass DP's main device than DDP's busiest rank. Otherwise refuted. The totals over all devices are reported.",
    seconds=(10, 25),
)

STEPS = 10


def measure(setting: Setting) -> Measurements:
    """Bytes per step, by number of devices. They may be more than the cores: bytes do not depend on speed."""
    measured: dict[str, Any] = {"countable": can_count(), "by_devices": {}}
    for count in setting.choose((2, 4), (2, 3, 4, 8)) if can_count() else ():
        setting.say(f"counting on {count} devices")
        ranks = run_ranks(count_ddp, count, timeout=120)
        (dp,) = run_ranks(count_dp, 1, count, timeout=120)
        measured["by_devices"][str(count)] = {"ddp": ranks, "dp": dp}
    return measured


def count_ddp(rank: int, world_size: int) -> dict[str, float]:
    """What the kernel says this rank sent and received, per step."""
    layout = Layout.model_validate({"kind": "ddp", "nproc_per_node": world_size})
    with Stepper("digits", layout, [f"global_batch_size={16 * world_size}"]) as stepper:
        stepper.step(3)
        dist.all_reduce(torch.zeros(1))
        before = bytes_moved()
        stepper.step(STEPS)
        sent, received = (after - then for after, then in zip(bytes_moved(), before, strict=True))
        model = stepper.trainer.model
        return {
            "sent": sent / STEPS,
            "received": received / STEPS,
            "gradients": _size(parameter.grad for parameter in model.parameters()),
            "buffers": _size(model.buffers()),
        }


def count_dp(rank: int, world_size: int, count: int) -> dict[str, float]:
    """What one process copies between its replicas, in bytes per step, by kind of move."""
    layout = Layout.model_validate({"kind": "dp", "nproc_per_node": count})
    with Stepper("digits", layout, [f"global_batch_size={16 * count}"]) as stepper:
        trainer = stepper.trainer
        assert isinstance(trainer, DataParallelTrainer)
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

        scatter = trainer._scatter
        trainer._scatter = scattered  # type: ignore[method-assign]
        trainer._reduce = counting("gradients", trainer._reduce)  # type: ignore[method-assign]
        for replica in trainer.replicas[1:]:
            replica.copy_from = counting("weights", replica.copy_from)  # type: ignore[method-assign]
        stepper.step(STEPS)
        return {move: total / STEPS for move, total in moved.items()}


class MovedBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are copied into, or added to, others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.add_.Tensor):
            self.bytes += _size([args[1]])
        return func(*args, **(kwargs or {}))


def _size(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor))


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    if not measurements["countable"]:
        return missing("Linux, whose kernel counts the bytes of each connection")
    figures, misses, said = [], [], []
    busiest: dict[str, list[float]] = {"DDP, busiest rank": [], "DP, main device": []}
    counts = list(measurements["by_devices"])
    for text, found in measurements["by_devices"].items():
        count, ranks, dp = int(text), found["ddp"], found["dp"]
        gradients, buffers = ranks[0]["gradients"], ranks[0]["buffers"]
        ddp_total, dp_total = sum(rank["sent"] for rank in ranks), sum(dp.values())
        theory = 2 * (count - 1) * gradients + (count - 1) * buffers
        busiest["DDP, busiest rank"].append(1e-6 * max(rank["sent"] + rank["received"] for rank in ranks))
        busiest["DP, main device"].append(1e-6 * dp_total)
        figures += [
            Figure(f"DDP x {count}: sent by all ranks, counted", ddp_total / 1e6, "MB"),
            Figure(f"DDP x {count}: gradients and buffers in theory", theory / 1e6, "MB"),
            Figure(f"DP x {count}: weights and buffers", dp["weights"] / 1e6, "MB"),
            Figure(f"DP x {count}: gradients", dp["gradients"] / 1e6, "MB"),
            Figure(f"DP x {count}: batch", dp["batch"] / 1e6, "MB"),
        ]
        said.append(f"x {count}: DP {dp_total / 1e6:.3f} MB, DDP {ddp_total / 1e6:.3f} MB")
        if dp["weights"] < (count - 1) * gradients:
            misses.append(f"DP x {count} does not move all weights")
        if abs(ddp_total / theory - 1) > 0.05:
            misses.append(f"DDP x {count} sends {ddp_total / theory:.2f} times its gradients and buffers")
    plot = Series(
        "Bytes per step through the busiest device, sent and received",
        Axis("devices", "", counts),
        Axis("bytes", "MB"),
        [Line(name, values) for name, values in busiest.items()],
    )
    reason = f"{'; '.join(said)}, all devices together"
    ratio = busiest["DP, main device"][-1] / busiest["DDP, busiest rank"][-1]
    figures.append(Figure(f"through the busiest device, DP / DDP, x {counts[-1]}", ratio, "x"))
    if ratio <= 1.05:
        misses.append(f"{ratio:.2f} times DDP's bytes pass DP's main device at {counts[-1]} devices")
    if misses:
        return Judgement("refuted", f"{'; '.join(misses)} ({reason})", figures, [plot])
    return Judgement(
        "confirmed",
        f"{reason}: nearly the same total; but at {counts[-1]} devices {ratio:.1f} times as much passes DP's main "
        "device as any rank of DDP",
        figures,
        [plot],
    )

"""What `backward` leaves in `.grad`, and what makes k micro-batches equal to one large batch.

A loss that averages divides by the size of its micro-batch only, so each of the k losses must also be divided by k.
Under DDP `no_sync()` puts off averaging over the ranks. BatchNorm normalises over the micro-batch.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ddp_core.base.seeds import share_of
from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, composed, holds, versions
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.measuring.ranks import run_ranks
from ddp_lab.records import COUNT, Figure

claim = Claim(
    id="C12",
    title="Gradients add up over backward calls, so k micro-batches equal one large batch",
    claim="loss.backward() adds to the gradients instead of replacing them (y = x² at 4: 8, then 16), so k "
    "micro-batches equal one large batch.",
    original="PyTorch 的设计中,loss.backward() 计算出的梯度默认是累加的,而非覆盖。\n"
    "利用这个特性,当大 Batch Size 导致 OOM 时,可以将其切分为多个 Mini-batch,连续执行多次 backward() 累积梯度,"
    "最后执行一次 optimizer.step()。",
    sources=("004",),
    method="y = x² at x = 4, backward twice; and a small CNN whose gradient over k micro-batches is compared with the "
    "one over the whole batch: mean and sum losses, on one process and under DDP with and without no_sync, rescaled "
    "and not.",
    rule="Three parts. backward adds: confirmed when x² gives 8 and then 16, else refuted. k micro-batches equal one "
    "large batch: confirmed when every rightly scaled case differs by at most the tolerance times the gradient's norm, "
    "and a mean loss that is not divided by k gives k times the gradient, else refuted. The same with BatchNorm: "
    "confirmed when it differs by at most the tolerance, too, else refuted.",
    in_short="Confirmed where x² gives 8 and then 16, and where micro-batches change the gradient by at most a"
    " millionth of its norm.",
    loads={"samples": (64, 64), "micro_batches": ((4,), (2, 4, 8)), "ranks": (2, 4), "tolerance": (1e-6, 1e-6)},
    history=versions(
        "2026-11-22 4fa300071486cfe3 The rule is the one before with its tolerance among the loads; several k and more "
        "ranks are new.",
        "2026-11-25 b2030959b5fa191c BatchNorm, the exception, is a part: before, it was reported beside a verdict of "
        "confirmed, where an exception of the same kind refuted C10.",
    ),
    seconds=(4, 5),
)


ADDS, EQUAL, NORMALISED = "backward adds gradients", "k micro-batches equal one large batch", "equal with BatchNorm"


def measure(setting: Setting) -> Measurements:
    """The gradients of x², and each case's relative difference and factor against one large batch."""
    x = torch.tensor(4.0, requires_grad=True)
    y = x * x
    square = []
    for _ in range(2):
        y.backward(retain_graph=True)
        assert x.grad is not None
        square.append(float(x.grad))
    load = claim.load(setting)
    cases = [
        {"micro_batches": count} | case
        for count in load.micro_batches
        for case in run_ranks(observe, load.ranks, load.samples, count)[0]
    ]
    return {"square": square, "ranks": load.ranks, "tolerance": load.tolerance, "cases": cases}


def observe(rank: int, world_size: int, samples: int, micro_batches: int) -> list[dict[str, Any]]:
    """Every case with this number of micro-batches; all ranks get the same figures under DDP."""
    inputs, targets = _data(samples)
    share = list(share_of(samples, rank, world_size))
    cases: list[dict[str, Any]] = []
    for loss in ("mean", "sum"):
        whole = _gradient(_network(), inputs, targets, loss, 1, 1.0)
        for rescaled in (True, False) if loss == "mean" else (True,):
            weight = 1 / micro_batches if loss == "mean" and rescaled else 1.0
            alone = _gradient(_network(), inputs, targets, loss, micro_batches, weight)
            cases.append({"where": "one process", "loss": loss, "rescaled": rescaled} | _compare(alone, whole))
            # DDP averages over the ranks: right for a loss that averages, but to be undone for one that sums.
            undo = world_size if loss == "sum" else 1
            for no_sync in (True, False):
                module = DistributedDataParallel(_network())
                ours = _gradient(module, inputs[share], targets[share], loss, micro_batches, weight * undo, no_sync)
                case = {"where": "DDP", "loss": loss, "rescaled": rescaled, "no_sync": no_sync}
                cases.append(case | _compare(ours, whole))
    normalised = _gradient(_network(True), inputs, targets, "sum", 1, 1.0)
    cut = _gradient(_network(True), inputs, targets, "sum", micro_batches, 1.0)
    cases.append({"where": "BatchNorm", "loss": "sum", "rescaled": True} | _compare(cut, normalised))
    return cases


def _data(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(samples, 1, 8, 8, generator=generator), torch.randint(0, 10, (samples,), generator=generator)


def _network(batch_norm: bool = False) -> nn.Module:
    torch.manual_seed(1)
    between = [nn.BatchNorm2d(8)] if batch_norm else []
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), *between, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    )


def _gradient(
    module: nn.Module, inputs: Tensor, targets: Tensor, loss: str, count: int, weight: float, no_sync: bool = False
) -> Tensor:
    """The flat gradient after backward over `count` micro-batches, each loss times `weight`."""
    parts = list(zip(inputs.chunk(count), targets.chunk(count), strict=True))
    for number, (some_inputs, some_targets) in enumerate(parts):
        last = number == len(parts) - 1
        waits = isinstance(module, DistributedDataParallel) and no_sync and not last
        with module.no_sync() if waits else contextlib.nullcontext():  # type: ignore[operator]
            outputs = module(some_inputs)
            (functional.cross_entropy(outputs, some_targets, reduction=loss) * weight).backward()
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters() if parameter.grad is not None])


def _compare(ours: Tensor, whole: Tensor) -> dict[str, float]:
    ours, whole = ours.double(), whole.double()
    factor = float(ours @ whole / (whole @ whole))
    return {"difference": float((ours - whole).norm() / whole.norm()), "factor": factor}


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    cases, tolerance, square = (measurements[name] for name in ("cases", "tolerance", "square"))
    right = [case for case in cases if case["rescaled"] and case["where"] != "BatchNorm"]
    wrong = [case for case in cases if not case["rescaled"]]
    normalised = [case for case in cases if case["where"] == "BatchNorm"]
    worst = max(right, key=lambda case: case["difference"])
    counts = sorted({case["micro_batches"] for case in cases})
    figures = [
        Figure("gradient of x² at 4, first backward", square[0], part=ADDS, bounds=(8, 8)),
        Figure("gradient of x² at 4, second backward", square[1], part=ADDS, bounds=(0, 16)),
        Figure("largest relative difference, rightly scaled", worst["difference"], part=EQUAL, bounds=COUNT),
    ]
    for count in counts:
        name = f"gradient too large by, mean loss not divided by k = {count}"
        factor = max(case["factor"] for case in wrong if case["micro_batches"] == count)
        figures.append(Figure(name, factor, "times", part=EQUAL, bounds=(1, 2 * count)))
    for part, group in ((EQUAL, right), (NORMALISED, normalised)):
        for case in group:
            name = f"relative difference, {_name(case)}"
            figures.append(Figure(name, case["difference"], part=part, bounds=COUNT))
    faults = [f"{_name(worst)} differs by {worst['difference']:.2g}"] if worst["difference"] > tolerance else []
    faults += [
        f"a mean loss that is not divided by k = {case['micro_batches']} gave {case['factor']:.6g} times the gradient"
        for case in wrong
        if abs(case["factor"] - case["micro_batches"]) > tolerance * case["micro_batches"]
    ]
    agreed = (
        f"{' or '.join(map(str, counts))} micro-batches differ from one large batch by at most "
        f"{worst['difference']:.1g} of its norm, with and without no_sync; a mean loss not divided by k is wrong by k"
    )
    parts = [
        holds(ADDS, square == [8.0, 16.0], f"x² gave {square[0]:g}, then {square[1]:g}"),
        holds(EQUAL, not faults, agreed, "; ".join(faults)),
    ]
    if normalised:
        apart = max(case["difference"] for case in normalised)
        text = f"the gradient differs by up to {apart:.2g} of its norm: BatchNorm sees a micro-batch"
        parts.append(holds(NORMALISED, apart <= tolerance, text))
    return composed(parts, figures)


def _name(case: dict[str, Any]) -> str:
    switch = "" if case.get("no_sync") is None else f", {'with' if case['no_sync'] else 'without'} no_sync"
    return f"{case['where']}, {case['loss']} loss, k = {case['micro_batches']}{switch}"

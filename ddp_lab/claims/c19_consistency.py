"""Where differences between layouts come from.

Floating-point addition is not associative, and another layout adds in another order. That it is the order, and not how
the batch is cut, shows beside a control: torch's DDP with the same micro-batches. The network has no BatchNorm, which
computes another function when a batch is cut. Without two CUDA devices a rendering of nn.DataParallel on CPU stands in
for it and decides nothing: a GPU's kernels add in an order of their own.
"""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from ddp_core.base.seeds import share_of
from ddp_core.reduction import ExactReduction
from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, composed, holds, versions
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.framework.statistics import ROUNDS, median_interval, ratio_interval
from ddp_lab.claims.measuring.ranks import own_device, run_ranks
from ddp_lab.claims.measuring.rendered_data_parallel import RenderedDataParallel
from ddp_lab.records import COUNT, Figure, Part, Verdict

claim = Claim(
    id="C19",
    title="DP's results may be inconsistent; DDP's are more consistent",
    claim="Under DP precision may be lost or results be inconsistent, since the main device updates the weights; DDP's "
    "processes update in step and are more consistent.",
    original="由于参数更新在主 GPU 上进行,可能存在精度损失或不一致的情况。"
    "各进程的模型参数同步更新,训练结果一致性更好。",
    sources=("003",),
    method="One small CNN without BatchNorm, the same initial weights and the same batches for each seed, trained on "
    "one device, under torch's DDP and under nn.DataParallel (on CPU: its rendering, a stand-in): SHA-256 over the "
    "parameters of every rank of DDP, and the largest difference of a parameter from one device's. And the same "
    "training with each batch cut into the same micro-batches on one device and on the ranks, added up by torch's DDP "
    "and by the exact reduction.",
    rule="Five parts. DDP's ranks agree: confirmed when with every seed all ranks end with the same bits, else "
    "refuted. DDP's results, and DP's results, may differ from one device's: each confirmed when they do with at least "
    "one seed, else refuted. DDP is nearer to one device than DP: confirmed when the interval of the ratio of the "
    "largest differences, DP's to DDP's, lies above 1, refuted when below, inconclusive otherwise. What speaks of DP "
    "is not measurable here without two CUDA devices. The order of additions is the cause: refuted when with any seed "
    "exact reduction ends with other bits on the ranks than on one device; confirmed when it does with none and "
    "torch's DDP with the same micro-batches with at least one; else inconclusive.",
    in_short="Confirmed where ranks have the same bits with every seed; where results differ with some; and where, with"
    " the same micro-batches, torch's DDP differs from one device and exact reduction does not.",
    loads={
        "seeds": ROUNDS,
        "ranks": (2, 2),
        "steps": (40, 40),
        "batch": (64, 64),
        "rate": (0.05, 0.05),
        "micro_batches": (4, 4),
    },
    history=versions(
        "2026-11-22 54059bbd625c176c The rule before was met by any difference from one device, and took this "
        "project's threads for DP. The sentence compares DP with DDP: now each half is a part, paired by seed, and "
        "what speaks of DP needs CUDA.",
        "2026-11-25 cb1585b1040eddad The median over the seeds is told beside the maximum. Beyond noise is the exact "
        "sign test with Holm's procedure over all intervals that bear verdicts, and the rounds follow from it.",
        "2026-11-29 ef51b90720e50979 The cause is judged on the network and the batches that it explains, beside a "
        "control with the same micro-batches; before, another network was trained, without one.",
    ),
    seconds=(35, 65),
    tests=1,
)


AGREE, DDP_DIFFERS, DP_DIFFERS = "DDP's ranks agree", "DDP may differ from one device", "DP may differ from one device"
NEARER, CAUSE = "DDP is nearer to one device than DP", "the order of additions is the cause"
EXACT, CUT = "the exact reduction", "torch's DDP"
STAND_IN = "nn.DataParallel rendered on CPU"
_SMALLEST = 1e-12
"""Added to both differences of a ratio, against a division by 0; far below the last bit of a weight."""


def measure(setting: Setting) -> Measurements:
    """Digests by rank, and differences by seed."""
    load = claim.load(setting)
    device = setting.device_type(load.ranks)
    how = (load.seeds, load.steps, load.batch, load.rate, load.micro_batches)
    ranks = run_ranks(observe, load.ranks, device, *how, device=device)
    cases = [case | {"digests": [rank[number]["digest"] for rank in ranks]} for number, case in enumerate(ranks[0])]
    return {"device": device, "ranks": load.ranks, "steps": load.steps, "cases": cases}


def observe(
    rank: int, world_size: int, device: str, seeds: int, steps: int, batch: int, rate: float, cut: int
) -> list[dict[str, Any]]:
    """By seed: the digest of this rank's parameters under DDP, and on rank 0 how far each way ends from one device."""
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False
    place, found = own_device(rank, device), []
    for seed in range(seeds):
        share = list(share_of(batch, rank, world_size))
        model = _network(seed).to(place)
        module = DistributedDataParallel(model, device_ids=[place] if device == "cuda" else None)
        for inputs, targets in _batches(seed, steps, batch, place):
            _step(model, module(inputs[share]), targets[share], rate)
        ours = _parameters(model)
        data, group = _batches(seed, steps, batch, place), dist.group.WORLD
        in_parts = {way: _cut(seed, data, rate, cut, way, group) for way in (CUT, EXACT)}
        case: dict[str, Any] = {"seed": seed, "digest": hashlib.sha256(ours.numpy().tobytes()).hexdigest()}
        if rank == 0:
            alone = _alone(seed, steps, batch, rate, place, 1)
            parallel = _alone(seed, steps, batch, rate, place, world_size)
            case |= {"ddp": _apart(ours, alone), "dp": _apart(parallel, alone)}
            case |= {way: _apart(ends, _cut(seed, data, rate, cut, way, None)) for way, ends in in_parts.items()}
        found.append(case)
    return found


def _alone(seed: int, steps: int, batch: int, rate: float, place: torch.device, replicas: int) -> Tensor:
    """Parameters after training in this process: on one device, or with several replicas as nn.DataParallel does."""
    model = _network(seed).to(place)
    module: nn.Module = model
    if replicas > 1:
        on_cuda = place.type == "cuda"
        module = nn.DataParallel(model, list(range(replicas))) if on_cuda else RenderedDataParallel(model, replicas)
    for inputs, targets in _batches(seed, steps, batch, place):
        _step(model, module(inputs), targets, rate)
    return _parameters(model)


def _cut(
    seed: int, data: list[tuple[Tensor, Tensor]], rate: float, cut: int, way: str, group: ProcessGroup | None
) -> Tensor:
    """Parameters after training with each batch cut into so many micro-batches, on the ranks of the group or alone."""
    place = data[0][0].device
    model = _network(seed).to(place)
    module = DistributedDataParallel(model, device_ids=[place] if place.type == "cuda" else None) if group else model
    exact = ExactReduction(module, cut) if way == EXACT else None
    share = list(exact.share if exact else share_of(cut, group.rank(), group.size()) if group else range(cut))
    for inputs, targets in data:
        model.zero_grad()
        for number in share:
            with exact.micro_batch(number) if exact else _added_up(module, number == share[-1]):
                outputs = module(inputs.chunk(cut)[number])
                functional.cross_entropy(outputs, targets.chunk(cut)[number], reduction="sum").backward()
        if exact:
            exact.finish(1 / len(inputs))
        # DDP divides the sum by the number of ranks.
        _descend(model, rate if exact else rate / len(inputs) * (group.size() if group else 1))
    if exact:
        exact.close()
    return _parameters(model)


def _added_up(module: nn.Module, is_last: bool) -> AbstractContextManager[None]:
    """Under DDP, gradients are exchanged in the last backward of a step alone."""
    ddp = module if isinstance(module, DistributedDataParallel) and not is_last else None
    return nullcontext() if ddp is None else ddp.no_sync()


def _apart(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max())


def _network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)),
    )


def _batches(seed: int, steps: int, batch: int, place: torch.device) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(batch, 1, 8, 8, generator=generator).to(place),
            torch.randint(0, 10, (batch,), generator=generator).to(place),
        )
        for _ in range(steps)
    ]


def _step(model: nn.Module, outputs: Tensor, targets: Tensor, rate: float) -> None:
    """Backward of the mean loss, and a step of SGD."""
    model.zero_grad()
    functional.cross_entropy(outputs, targets).backward()
    _descend(model, rate)


def _descend(model: nn.Module, rate: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.sub_(rate * parameter.grad)


def _parameters(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).cpu()


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    cases, on_cuda = measurements["cases"], measurements["device"] == "cuda"
    stand_in, of_all, bounds = "" if on_cuda else STAND_IN, f"of {len(cases)}", (0, len(cases))
    agree = sum(len(set(case["digests"])) == 1 for case in cases)
    figures = [Figure("seeds with which all ranks have the same bits", agree, of_all, part=AGREE, bounds=bounds)]
    text = f"{agree} {of_all} seeds end with the same bits on all {measurements['ranks']} ranks"
    parts = [holds(AGREE, agree == len(cases), text)]
    for name, way, marked in ((DDP_DIFFERS, "ddp", ""), (DP_DIFFERS, "dp", stand_in)):
        differences = [case[way] for case in cases]
        count, most = sum(difference > 0 for difference in differences), max(differences)
        middle, largest = median_interval(differences), "largest difference of a parameter"
        how: dict[str, Any] = {"part": name, "stand_in": marked}
        figures.append(Figure("seeds that end with other bits", count, of_all, bounds=bounds, **how))
        figures.append(middle.figure(f"{largest}, median", "", name, marked, bounds=COUNT))
        figures.append(Figure(f"{largest}, maximum", most, bounds=COUNT, **how))
        text = f"{count} {of_all} seeds end with other bits; the {largest} is {middle.value:.1g} in the median of the "
        parts.append(_unless(marked, holds(name, count, f"{text}seeds and {most:.1g} at most")))
    ratio = ratio_interval(*([case[way] + _SMALLEST for case in cases] for way in ("dp", "ddp")))
    title, against = "largest difference, DP's against DDP's", 1.0 if on_cuda else None
    figures.append(ratio.figure(title, "times", NEARER, stand_in, against))
    parts.append(_unless(stand_in, Part(NEARER, ratio.side(), f"DP's largest difference is {ratio} times DDP's")))
    others = {way: sum(case[way] > 0 for case in cases) for way in (EXACT, CUT)}
    title = "seeds that end with other bits, the same micro-batches"
    figures += [Figure(f"{title}, {way}", found, of_all, part=CAUSE, bounds=bounds) for way, found in others.items()]
    verdict: Verdict = "refuted" if others[EXACT] else "confirmed" if others[CUT] else "inconclusive"
    text = f"with the same micro-batches, {others[EXACT]} {of_all} seeds end with other bits by {EXACT}, "
    return composed([*parts, Part(CAUSE, verdict, f"{text}{others[CUT]} by {CUT}")], figures)


def _unless(stand_in: str, part: Part) -> Part:
    """The part, but not measurable where something stood in."""
    if not stand_in:
        return part
    return Part(part.name, "not measurable here", f"needs 2 CUDA devices; {stand_in} decides nothing: {part.reason}")

"""Which ranks should validate.

If rank 0 validates alone, it has to see all held-out samples while the others wait. If the samples are dealt out,
each rank sees its share, and the sums of loss and count are added up. That gives the same mean, but for rounding, as
long as every sample is counted once. The sources deal out with DistributedSampler, which repeats samples where the
number of ranks does not divide the number of samples: those count twice, and the loss comes out different. This
project's `ddp_core.trainers.evaluation` deals out fixed batches.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddp_core.config.experiment import Evaluation
from ddp_core.data.splits import InMemory
from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.world import World
from ddp_core.model.builders import small_cnn
from ddp_core.model.losses import cross_entropy
from ddp_core.trainers.evaluation import evaluate
from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, RuleVersion, composed
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.framework.statistics import ratio_interval
from ddp_lab.claims.measuring.measure import timed_rounds
from ddp_lab.claims.measuring.ranks import run_ranks
from ddp_lab.records import Axis, Figure, Line, Part, Series, Verdict

claim = Claim(
    id="C13",
    title="Validating on all ranks gives the loss of validating on rank 0, faster",
    claim="Validating on rank 0 alone is simple but lets the others wait; validating on all ranks and adding up losses "
    "and counts gives the same loss in less time.",
    original="Rank 0 独占:只在 Rank 0 上跑全量验证集。这个方法比较简单但会造成其他 GPU 等待所以效率低。\n"
    "分布式验证:各 Rank 跑一部分最后聚合 Loss 和样本数,一般都会用这个方案。",
    sources=("002", "004"),
    method="The loss of one network over held-out sets whose sizes the ranks divide and do not divide: rank 0 alone, "
    "all ranks with this project's evaluation, and all ranks with torch's DistributedSampler. Then the time of the "
    "first two, in interleaved rounds, on a larger set.",
    rule="Two parts. The same loss: confirmed when the losses of rank 0 and of all ranks agree to 1e-6 relative at "
    "every size, else refuted. Faster: confirmed when all ranks take less time than rank 0 alone beyond noise, refuted "
    "when they take more, else inconclusive; not measurable with fewer than two cores. What DistributedSampler gives "
    "is reported.",
    loads={
        "sizes": ((1, 3, 5, 10, 64, 101), (1, 3, 5, 10, 64, 101)),
        "agree_to": (1e-6, 1e-6),
        "samples_per_batch": (64, 64),
        "timed_samples": (2048, 8192),
        "rounds": (11, 21),
    },
    history=(
        RuleVersion(
            "2026-11-22",
            "The two halves of the sentence are parts with verdicts of their own; the limits are the same as before.",
            "cfba3cdd3e4a5703",
        ),
    ),
    seconds=(8, 30),
    headline="time on all of",
)

SAME_LOSS, FASTER = "the same loss", "in less time"


def measure(setting: Setting) -> Measurements:
    """Losses by size and way, seconds by way and round, for each number of ranks."""
    load = claim.load(setting)
    # The ranks compute on CPU, so each of them needs a core.
    counts = sorted({2, 2 if setting.quick else max(2, min(4, setting.cores))})
    how = (load.sizes, load.samples_per_batch, load.timed_samples, load.rounds)
    cases = [{"ranks": count} | run_ranks(observe, count, *how)[0] for count in counts]
    return {"devices": setting.cores, "agree_to": load.agree_to, "cases": cases}


def observe(
    rank: int, world_size: int, sizes: tuple[int, ...], samples_per_batch: int, timed_samples: int, rounds: int
) -> dict[str, Any]:
    """Losses and times with this number of ranks."""
    torch.manual_seed(0)
    model = small_cnn(width=24).eval()
    collectives = Collectives(World.from_environment(), torch.device("cpu"))

    def validate(data: InMemory, where: str) -> float:
        return _evaluate(model, data, where, samples_per_batch, collectives)

    losses = {}
    for size in sizes:
        data = _held_out(size)
        ours = {where: validate(data, where) for where in ("rank0", "all_ranks")}
        losses[str(size)] = ours | {"padded": _with_distributed_sampler(model, data, samples_per_batch)}
    data = _held_out(timed_samples)
    ways = {where: lambda where=where: validate(data, where) for where in ("rank0", "all_ranks")}
    return {"losses": losses, "samples": timed_samples, "seconds": timed_rounds(ways, rounds)}


def _held_out(size: int) -> InMemory:
    generator = torch.Generator().manual_seed(size)
    return InMemory(torch.randn(size, 1, 8, 8, generator=generator), torch.randint(0, 10, (size,), generator=generator))


def _evaluate(model: nn.Module, data: InMemory, where: str, samples_per_batch: int, collectives: Collectives) -> float:
    def forward(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outputs = model(inputs)
        return outputs, targets, cross_entropy(outputs, targets)

    settings = Evaluation.model_validate({"where": where, "samples_per_batch": samples_per_batch})
    return float(evaluate(model, forward, None, data, settings, collectives)["test_loss"])


@torch.no_grad()
def _with_distributed_sampler(model: nn.Module, data: InMemory, samples_per_batch: int) -> float:
    """Source 004's `validate`, with the sampler that the sources use."""
    pairs = TensorDataset(data.inputs, data.targets)
    sampler: DistributedSampler[Any] = DistributedSampler(pairs, shuffle=False)
    total = torch.zeros(2, dtype=torch.float64)
    for inputs, targets in DataLoader(pairs, batch_size=samples_per_batch, sampler=sampler):
        loss = functional.cross_entropy(model(inputs), targets)
        total += torch.tensor([loss.item() * len(inputs), len(inputs)], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total[0] / total[1])


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    cases = measurements["cases"]
    worst, padded = 0.0, 0.0
    for case in cases:
        for losses in case["losses"].values():
            worst = max(worst, _apart(losses["all_ranks"], losses["rank0"]))
            padded = max(padded, _apart(losses["padded"], losses["rank0"]))
    figures = [
        Figure("largest relative difference of the loss, rank 0 and all ranks", worst, part=SAME_LOSS),
        Figure("the same with DistributedSampler, which pads", padded, part=SAME_LOSS),
    ]
    said = f"the losses differ by at most {worst:.1g}, and with DistributedSampler, which pads, by {100 * padded:.2g} %"
    parts = [Part(SAME_LOSS, "confirmed" if worst <= measurements["agree_to"] else "refuted", said)]
    faster = Part(FASTER, "not measurable here", f"needs 2 cores, found {measurements['devices']}")
    for case in cases:
        ratio = ratio_interval(case["seconds"]["all_ranks"], case["seconds"]["rank0"])
        figures.append(ratio.figure(f"time on all of {case['ranks']} ranks / rank 0 alone", "x", FASTER))
        if case["ranks"] <= measurements["devices"]:
            verdict: Verdict = "confirmed" if ratio.below_one else "refuted" if ratio.above_one else "inconclusive"
            faster = Part(FASTER, verdict, f"{case['ranks']} ranks take {ratio} of rank 0's time")
    first = cases[0]
    sizes = list(first["losses"])
    plot = Series(
        f"Relative difference from rank 0's loss, {first['ranks']} ranks",
        Axis("held-out samples", "", sizes),
        Axis("difference", "%"),
        [
            Line(name, [100 * _apart(first["losses"][size][way], first["losses"][size]["rank0"]) for size in sizes])
            for name, way in (("batches dealt out", "all_ranks"), ("DistributedSampler", "padded"))
        ],
    )
    return composed([*parts, faster], figures, [plot])


def _apart(loss: float, reference: float) -> float:
    return abs(loss - reference) / abs(reference)

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

from ddp_core.data.splits import InMemory
from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.world import World
from ddp_core.model.builders import small_cnn
from ddp_core.model.losses import cross_entropy
from ddp_core.spec.experiment import Evaluation
from ddp_core.trainers.evaluation import evaluate
from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.framework.statistics import ratio_interval
from ddp_lab.claims.measuring.measure import timed_rounds
from ddp_lab.claims.measuring.ranks import run_ranks
from ddp_lab.records import Axis, Figure, Line, Series

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
    "first two, interleaved, on the largest set.",
    rule="Confirmed when the losses of rank 0 and of all ranks agree to 1e-6 relative at every size, and all ranks are "
    "faster beyond noise. Refuted when a loss differs, or all ranks are slower beyond noise. Inconclusive when the "
    "times cannot be told apart; not measurable here where two ranks share one device.",
    seconds=(8, 20),
)

TOLERANCE = 1e-6
SIZES = (1, 3, 5, 10, 64, 101)
SAMPLES_PER_BATCH = 64


def measure(setting: Setting) -> Measurements:
    """Losses by size and way, seconds by way and round, for each number of ranks."""
    counts = sorted({2, setting.choose(2, max(2, min(4, setting.cores)))})
    # The ranks compute on CPU, so each of them needs a core.
    cases = [
        {"ranks": count} | run_ranks(observe, count, setting.choose(2048, 8192), setting.choose(11, 21))[0]
        for count in counts
    ]
    return {"devices": setting.cores, "cases": cases}


def observe(rank: int, world_size: int, timed_samples: int, rounds: int) -> dict[str, Any]:
    """Losses and times with this number of ranks."""
    torch.manual_seed(0)
    model = small_cnn(width=24).eval()
    collectives = Collectives(World.from_environment(), torch.device("cpu"))
    losses = {}
    for size in SIZES:
        data = _held_out(size)
        ours = {where: _evaluate(model, data, where, collectives) for where in ("rank0", "all_ranks")}
        losses[str(size)] = ours | {"padded": _with_distributed_sampler(model, data)}
    data = _held_out(timed_samples)
    ways = {where: lambda where=where: _evaluate(model, data, where, collectives) for where in ("rank0", "all_ranks")}
    return {"losses": losses, "samples": timed_samples, "seconds": timed_rounds(ways, rounds)}


def _held_out(size: int) -> InMemory:
    generator = torch.Generator().manual_seed(size)
    return InMemory(torch.randn(size, 1, 8, 8, generator=generator), torch.randint(0, 10, (size,), generator=generator))


def _evaluate(model: nn.Module, data: InMemory, where: str, collectives: Collectives) -> float:
    def forward(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outputs = model(inputs)
        return outputs, targets, cross_entropy(outputs, targets)

    settings = Evaluation.model_validate({"where": where, "samples_per_batch": SAMPLES_PER_BATCH})
    return float(evaluate(model, forward, None, data, settings, collectives)["test_loss"])


@torch.no_grad()
def _with_distributed_sampler(model: nn.Module, data: InMemory) -> float:
    """Source 004's `validate`, with the sampler that the sources use."""
    pairs = TensorDataset(data.inputs, data.targets)
    sampler: DistributedSampler[Any] = DistributedSampler(pairs, shuffle=False)
    total = torch.zeros(2, dtype=torch.float64)
    for inputs, targets in DataLoader(pairs, batch_size=SAMPLES_PER_BATCH, sampler=sampler):
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
        Figure("largest relative difference of the loss, rank 0 and all ranks", worst),
        Figure("the same with DistributedSampler, which pads", padded),
    ]
    timed = []
    for case in cases:
        ratio = ratio_interval(case["seconds"]["all_ranks"], case["seconds"]["rank0"])
        timed.append((case["ranks"], ratio))
        name = f"time on all of {case['ranks']} ranks against rank 0 alone"
        figures.append(Figure(name, ratio.value, "times", ratio.low, ratio.high))
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
    if worst > TOLERANCE:
        return Judgement("refuted", f"the losses differ by up to {worst:.2g}", figures, [plot])
    able = [(ranks, ratio) for ranks, ratio in timed if ranks <= measurements["devices"]]
    same = f"the losses agree to {worst:.1g} (with DistributedSampler they differ by up to {100 * padded:.2g} %)"
    if not able:
        needs = f"{timed[0][0]} cores to compare times on, found {measurements['devices']}; {same}"
        return Judgement("not measurable here", f"needs {needs}", figures, [plot])
    ranks, ratio = able[-1]
    times = f"{ranks} ranks take {ratio} of rank 0's time"
    if ratio.below_one:
        return Judgement("confirmed", f"{same}; {times}", figures, [plot])
    if ratio.above_one:
        return Judgement("refuted", f"{same}, but it is slower: {times}", figures, [plot])
    return Judgement("inconclusive", f"{same}; the times cannot be told apart: {times}", figures, [plot])


def _apart(loss: float, reference: float) -> float:
    return abs(loss - reference) / abs(reference)

"""Which ranks should validate.

The sources deal out with DistributedSampler, which repeats samples where the number of ranks does not divide their
number: those count twice. This project's `ddp_core.trainers.evaluation` deals out fixed batches.
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
from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, composed, holds, versions
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.framework.statistics import ROUNDS, ratio_interval
from ddp_lab.claims.measuring.measure import timed_rounds
from ddp_lab.claims.measuring.ranks import run_ranks
from ddp_lab.records import COUNT, Axis, Figure, Line, Part, Series

claim = Claim(
    id="C13",
    title="Validating on all ranks gives the loss of validating on rank 0, faster",
    claim="Validating on rank 0 alone is simple but lets the others wait; validating on all ranks and adding up losses "
    "and counts gives the same loss in less time.",
    original="Rank 0 独占:只在 Rank 0 上跑全量验证集。这个方法比较简单但会造成其他 GPU 等待所以效率低。\n"
    "分布式验证:各 Rank 跑一部分最后聚合 Loss 和样本数,一般都会用这个方案。",
    sources=("002", "004"),
    method="The loss of one network over held-out sets whose sizes the ranks divide and do not divide, on rank 0 alone "
    "and on all ranks, in two ways: source 004's own loop, with torch's DistributedSampler and an all-reduce of two "
    "sums, and this project's evaluation. Then the time of each, in interleaved rounds, on a larger set.",
    rule="Five parts. The same loss: confirmed when the losses of rank 0 and of all ranks agree to 1e-6 relative at "
    "every size, else refuted; the source's own way in two parts, sizes that the ranks divide and sizes that they do "
    "not, and this project's evaluation at all sizes. Faster, each way: confirmed when all ranks take less time than "
    "rank 0 alone beyond noise, refuted when they take more, else inconclusive; not measurable with fewer than two "
    "cores.",
    in_short="Confirmed where losses agree to 1e-6 relative at every size; and where all ranks take less time beyond "
    "noise.",
    loads={
        "sizes": ((1, 3, 5, 10, 64, 101), (1, 3, 5, 10, 64, 101)),
        "agree_to": (1e-6, 1e-6),
        "samples_per_batch": (64, 64),
        "timed_samples": (2048, 8192),
        "rounds": (ROUNDS[0], 21),
    },
    history=versions(
        "2026-11-22 cfba3cdd3e4a5703 The two halves of the sentence are parts with verdicts of their own; the limits "
        "are the same as before.",
        "2026-11-25 286fd2b58072ce10 The source's own loop, torch alone, is judged beside this project's evaluation, "
        "which the sentence does not speak of. Beyond noise is the exact sign test with Holm's procedure over all "
        "intervals that bear verdicts, and the rounds follow from it.",
    ),
    seconds=(12, 45),
    tests=2,
)


OWN, OURS = "the source's own way", "this project's evaluation"
DIVIDES = f"the same loss, {OWN}, equal shares"
DOES_NOT = f"the same loss, {OWN}, unequal shares"
SAME_LOSS = f"the same loss, {OURS}"
WAYS = {OWN: ("own_rank0", "own_all_ranks"), OURS: ("rank0", "all_ranks")}


def measure(setting: Setting) -> Measurements:
    """Losses by size and way, seconds by way and round, for each number of ranks."""
    load = claim.load(setting)
    # The ranks compute on CPU, so each of them needs a core.
    counts = sorted({2, 2 if setting.quick else max(2, min(4, setting.cores))})
    cases = [{"ranks": count} | run_ranks(observe, count, load)[0] for count in counts]
    return {"devices": setting.cores, "agree_to": load.agree_to, "cases": cases}


def observe(rank: int, world_size: int, load: Any) -> dict[str, Any]:
    """Losses and times with this number of ranks."""
    torch.manual_seed(0)
    model, batch = small_cnn(width=24).eval(), load.samples_per_batch
    collectives = Collectives(World.from_environment(), torch.device("cpu"))

    def validate(data: InMemory, where: str) -> float:
        if where in WAYS[OWN]:
            return _own_way(model, data, where == "own_all_ranks", batch)
        return _evaluate(model, data, where, batch, collectives)

    ways = [*WAYS[OURS], *WAYS[OWN]]
    losses = {str(size): {where: validate(_held_out(size), where) for where in ways} for size in load.sizes}
    data = _held_out(load.timed_samples)
    seconds = timed_rounds({where: lambda where=where: validate(data, where) for where in ways}, load.rounds)  # type: ignore[misc]
    return {"losses": losses, "samples": load.timed_samples, "seconds": seconds}


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
def _own_way(model: nn.Module, data: InMemory, on_all: bool, samples_per_batch: int) -> float:
    """Source 004's `validate`: on all ranks with the sampler that the sources use, or on rank 0 while others wait."""
    if not on_all and dist.get_rank():
        return 0.0
    pairs = TensorDataset(data.inputs, data.targets)
    sampler: DistributedSampler[Any] | None = DistributedSampler(pairs, shuffle=False) if on_all else None
    loss_sum, samples = 0.0, 0
    for inputs, targets in DataLoader(pairs, batch_size=samples_per_batch, sampler=sampler):
        loss_sum += functional.cross_entropy(model(inputs), targets).item() * len(inputs)
        samples += len(inputs)
    total_loss, total_samples = torch.tensor([loss_sum]), torch.tensor([samples])
    if on_all:
        dist.all_reduce(total_loss)
        dist.all_reduce(total_samples)
    return float(total_loss.item() / total_samples.item())


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    cases, cores = measurements["cases"], measurements["devices"]
    apart: dict[str, list[float]] = {DIVIDES: [], DOES_NOT: [], SAME_LOSS: []}
    for case in cases:
        for size, losses in case["losses"].items():
            divides = int(size) % case["ranks"] == 0
            apart[DIVIDES if divides else DOES_NOT].append(_apart(losses, *WAYS[OWN]))
            apart[SAME_LOSS].append(_apart(losses, *WAYS[OURS]))
    parts, figures = [], []
    for name, differences in apart.items():
        worst = max(differences)
        title = "largest relative difference of the loss, rank 0 and all ranks"
        figures.append(Figure(title, worst, part=name, bounds=COUNT))
        said = f"the losses differ by up to {worst:.1g} relative (limit 1e-06)"
        parts.append(holds(name, worst <= measurements["agree_to"], said))
    most = max((case["ranks"] for case in cases if case["ranks"] <= cores), default=None)
    for way, (alone, together) in WAYS.items():
        name = f"in less time, {way}"
        faster = Part(name, "not measurable here", f"needs 2 cores, found {cores}")
        for case in cases:
            ratio, judged = ratio_interval(case["seconds"][together], case["seconds"][alone]), case["ranks"] == most
            title = f"time on all of {case['ranks']} ranks / rank 0 alone"
            figures.append(ratio.figure(title, "x", name, against=1.0 if judged else None))
            if judged:
                said = f"{most} ranks take {ratio} of rank 0's time"
                faster = Part(name, ratio.side(1.0, "refuted", "confirmed"), said)
        parts.append(faster)
    losses = cases[0]["losses"]
    lines = [Line(way, [100 * _apart(found, *pair) for found in losses.values()]) for way, pair in WAYS.items()]
    title, axis = f"Relative difference from rank 0's loss, {cases[0]['ranks']} ranks", Axis("difference", "%")
    return composed(parts, figures, [Series(title, Axis("held-out samples", "", list(losses)), axis, lines)])


def _apart(losses: dict[str, float], alone: str, together: str) -> float:
    return abs(losses[together] - losses[alone]) / abs(losses[alone])

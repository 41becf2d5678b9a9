"""Whether ranks really get different samples.

Where the number of ranks does not divide the length, DistributedSampler repeats the first samples of the epoch.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, Sampler

from ddp_core.sampler import ElasticSampler
from ddp_lab.claims.c09_set_epoch import Ids
from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, composed, holds, versions
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.measuring.ranks import run_ranks
from ddp_lab.records import COUNT, Axis, Figure, Line, Part, Series

claim = Claim(
    id="C10",
    title="DistributedSampler gives ranks non-overlapping data",
    claim="DistributedSampler cuts the data by rank, so that every process gets data that do not overlap.",
    original="torch.utils.data.distributed.DistributedSampler在分布式环境中根据GPU的索引来进行数据切分，"
    "使得每个GPU不同的minibatch数据 。\n"
    "# 创建分布式采样器，确保每个进程获取不同的数据子集\n"
    "需要使用 DistributedSampler 等工具,确保各进程加载不同的数据子集,避免数据重复。\n"
    "DistributedSampler 会根据 Rank ID 自动切分数据集,确保每个进程拿到不重叠的数据子集。",
    sources=("000", "001", "002", "003", "004"),
    method="The ids that each rank loads in one epoch, for lengths that the number of ranks divides and lengths that "
    "it does not, from torch's DistributedSampler and from this project's ElasticSampler.",
    rule="Two parts, of torch's sampler: lengths that the number of ranks divides, and lengths that it does not. Each "
    "is confirmed when no sample is given out twice in an epoch, refuted when one is.",
    in_short="Confirmed where no sample is given out twice in an epoch.",
    loads={"ranks": ((2, 3), (2, 3, 4, 8)), "lengths": ((96, 97, 100, 101), (96, 97, 100, 101, 1000, 1003))},
    history=versions(
        "2026-11-22 47a725486d4839e9 The rule is the one before, with what is measured among the loads; two longer "
        "lengths are new.",
        "2026-11-25 0d5e1356909e9b85 Lengths that divide and lengths that do not are parts: before, the exception "
        "alone refuted the whole sentence, where C12 was confirmed beside an exception of the same kind.",
    ),
    seconds=(3, 4),
)


DIVIDES, DOES_NOT = "where the ranks divide the length", "where they do not"


def measure(setting: Setting) -> Measurements:
    """Samples given out twice, and left out, by sampler, ranks and length."""
    load, cases = claim.load(setting), []
    for count in load.ranks:
        ranks = run_ranks(observe, count, load.lengths)
        for name in ("torch", "elastic"):
            for length in load.lengths:
                given = Counter(number for rank in ranks for number in rank[name][str(length)])
                found = {"repeated": given.total() - len(given), "left_out": length - len(given)}
                cases.append({"sampler": name, "ranks": count, "length": length} | found)
    return {"cases": cases}


def observe(rank: int, world_size: int, lengths: tuple[int, ...]) -> dict[str, Any]:
    """The ids that this rank loads, by sampler and length."""
    return {
        name: {str(length): _load(kind(Ids(length)), length) for length in lengths}
        for name, kind in (("torch", DistributedSampler), ("elastic", ElasticSampler))
    }


def _load(sampler: Sampler[int], length: int) -> list[int]:
    return [int(number) for batch in DataLoader(Ids(length), batch_size=8, sampler=sampler) for number in batch]


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    cases = measurements["cases"]
    torchs, ours = ([case for case in cases if case["sampler"] == name] for name in ("torch", "elastic"))
    figures = [
        Figure(f"samples {what} by ElasticSampler", max((case[key] for case in ours), default=0), bounds=COUNT)
        for what, key in (("repeated", "repeated"), ("left out", "left_out"))
    ]
    parts = []
    for name, divides in ((DIVIDES, True), (DOES_NOT, False)):
        of_these = [case for case in torchs if (case["length"] % case["ranks"] == 0) == divides]
        if not of_these:
            parts.append(Part(name, "not measurable here", "needs such a length"))
            continue
        worst = max(of_these, key=lambda case: case["repeated"])
        # What pads can repeat is at most a sample for each rank but one.
        bounds, repeated = (0, max(case["ranks"] for case in of_these) - 1), worst["repeated"]
        figures.append(
            Figure("samples repeated by torch's sampler, most in one epoch", repeated, part=name, bounds=bounds)
        )
        said = f"up to {repeated} of {worst['length']} samples are repeated, on {worst['ranks']} ranks"
        parts.append(holds(name, not repeated, "no sample is given out twice", said))
    most, lengths = max(case["ranks"] for case in cases), sorted({case["length"] for case in cases})
    lines = []
    for name, group in (("DistributedSampler", torchs), ("ElasticSampler", ours)):
        repeated = {case["length"]: case["repeated"] for case in group if case["ranks"] == most}
        lines += [Line(name, [repeated.get(length) for length in lengths])] if group else []
    axes = Axis("samples in the data set", "", list(map(str, lengths))), Axis("repeated", "samples")
    return composed(parts, figures, [Series(f"Samples given out twice in one epoch, {most} ranks", *axes, lines)])

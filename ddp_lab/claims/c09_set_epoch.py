"""What `set_epoch` is for.

DistributedSampler shuffles with a generator seeded by seed + epoch, and only the training loop can tell it the epoch.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler

from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, composed, holds, versions
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.measuring.ranks import run_ranks
from ddp_lab.records import Axis, Figure, Line, Series

claim = Claim(
    id="C09",
    title="Without set_epoch every epoch has the same order",
    claim="Call set_epoch(epoch) before each epoch; otherwise the order of the data is exactly the same in every "
    "epoch, and the model sees only part of the data.",
    original="注意:必须在每个 epoch 开始前调用 set_epoch(epoch),否则每个 epoch 的数据切分顺序将完全一样"
    "导致模型只见过部分数据,影响泛化能力。",
    sources=("004",),
    method="The sample ids that each rank gets from a DataLoader with DistributedSampler over several epochs, with and "
    "without set_epoch, and with shuffle=False as in the source's own code.",
    rule="Two parts. The order repeats: confirmed when on every rank all epochs are equal without set_epoch and all "
    "different with it (shuffle on), else refuted. The model sees only part of the data: confirmed when in some epoch "
    "without set_epoch all ranks together, whose gradients are averaged, do not see every sample, else refuted.",
    in_short="Confirmed where all epochs are equal without `set_epoch` and different with it; and where in some epoch "
    "the ranks together miss a sample.",
    loads={"samples": (64, 1000), "epochs": (4, 8), "ranks": (2, 4), "batch": (8, 8)},
    history=versions(
        "2026-11-22 d2cd38bc1cd055a5 That the model sees only part of the data was quoted and measured, but not "
        "judged; now it is a part."
    ),
    seconds=(2, 1),
)


WAYS = {"without": (False, True), "with": (True, True), "with_unshuffled": (True, False)}


class Ids(Dataset[int]):
    """Sample i is the number i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def measure(setting: Setting) -> Measurements:
    """Ids by way, rank and epoch."""
    load = claim.load(setting)
    ranks = run_ranks(observe, load.ranks, load.samples, load.epochs, load.batch)
    return {"samples": load.samples, "ids": {way: [rank[way] for rank in ranks] for way in WAYS}}


def observe(rank: int, world_size: int, samples: int, epochs: int, batch: int) -> dict[str, Any]:
    """The ids that this rank loads, epoch by epoch."""
    return {way: _epochs(*switches, samples, epochs, batch) for way, switches in WAYS.items()}


def _epochs(set_epoch: bool, shuffle: bool, samples: int, count: int, batch: int) -> list[list[int]]:
    sampler: DistributedSampler[int] = DistributedSampler(Ids(samples), shuffle=shuffle)
    loader = DataLoader(Ids(samples), batch_size=batch, sampler=sampler)
    epochs = []
    for epoch in range(count):
        if set_epoch:
            sampler.set_epoch(epoch)
        epochs.append([int(number) for batch in loader for number in batch])
    return epochs


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    ids, samples = measurements["ids"], measurements["samples"]
    equal = all(_distinct(rank) == 1 for rank in ids["without"])
    different = all(_distinct(rank) == len(rank) for rank in ids["with"])
    unshuffled = all(_distinct(rank) == 1 for rank in ids["with_unshuffled"])
    without, with_it = (_seen_by_rank_0(ids[way][0], samples) for way in ("without", "with"))
    # What all ranks together see in the epoch in which they see least.
    moments = zip(*ids["without"], strict=True)
    together = 100 * min(len({number for epoch in moment for number in epoch}) for moment in moments) / samples
    figures = [
        Figure("epochs equal without set_epoch", equal),
        Figure("epochs different with set_epoch", different),
        Figure("with shuffle=False set_epoch changes nothing", unshuffled),
        Figure("data that all ranks together see per epoch, without set_epoch", together, "%"),
        Figure("data that rank 0 has seen at the end, without set_epoch", without[-1], "%"),
        Figure("data that rank 0 has seen at the end, with set_epoch", with_it[-1], "%"),
    ]
    axis, lines = Axis("epoch", "", list(range(1, len(with_it) + 1))), {"with": with_it, "without": without}
    plot = Series(
        *("Share of the data that rank 0 has seen", axis, Axis("seen so far", "%")),
        [Line(f"{way} set_epoch", seen) for way, seen in lines.items()],
    )
    words = [] if equal else ["epochs differ without set_epoch"]
    words += [] if different else ["epochs repeat with set_epoch"]
    so = "all epochs are equal without set_epoch and all different with it"
    seen = f"all ranks together see {together:.0f} % of the data in each epoch without set_epoch; each rank by itself "
    parts = [
        holds("the order repeats", not words, so, "; ".join(words)),
        holds(
            *("the model sees only part of the data", together < 100),
            f"{seen}sees the same {without[-1]:.0f} % every time",
        ),
    ]
    return composed(parts, figures, [plot])


def _distinct(epochs: list[list[int]]) -> int:
    return len({tuple(epoch) for epoch in epochs})


def _seen_by_rank_0(epochs: list[list[int]], samples: int) -> list[float]:
    """The percentage of the data that one rank has seen by the end of each epoch."""
    so_far: set[int] = set()
    return [100 * len(so_far := so_far | set(epoch)) / samples for epoch in epochs]

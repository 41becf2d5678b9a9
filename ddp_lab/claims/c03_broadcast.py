"""What DDP copies from rank 0, and when.

Construction sends parameters and buffers. Afterwards parameters stay equal because every rank applies the same mean
gradient; buffers have no gradient, so DDP copies rank 0's before each forward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements, composed, holds, versions
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.measuring.ranks import run_ranks
from ddp_lab.records import Figure

claim = Claim(
    id="C03",
    title="DDP broadcasts parameters and buffers at construction and before every forward",
    claim="DDP broadcasts rank 0's parameters and buffers to the other ranks at construction and before every forward.",
    original="DDP在构建及每次前向传递开始前会同步各进程之间的parameters及buffers"
    "（DistributedDataParallel类的\\_\\_init\\_\\_及forward方法中）\n"
    "广播权重(Broadcast):训练开始时,Rank 0 节点的模型权重被广播到所有其他节点,确保初始状态一致。",
    sources=("000", "004"),
    method="Every rank starts with different weights and a different counter `cnt`, and adds a different amount to its "
    "counter after each forward. Looked at: the parameters and the counter after construction, the counter on entry to "
    "each forward, with broadcast_buffers on (the default) and off; and, when a rank has changed its parameters on its "
    "own, whether the next forward makes them equal again.",
    rule="Four parts. Parameters at construction, and buffers at construction: confirmed when they are equal on all "
    "ranks, else refuted. Buffers before every forward: confirmed when the counters are equal on entry to each forward "
    "with broadcast_buffers on and different with it off, so that nothing else makes them equal; else refuted. "
    "Parameters before every forward: confirmed when the next forward makes parameters equal again that ranks have "
    "changed, else refuted.",
    in_short="Confirmed where values that differed between the ranks are equal at that moment because DDP sent them.",
    loads={"ranks": ((2,), (2, 4)), "forwards": (3, 5)},
    history=versions(
        "2026-11-22 9bb49dafabb30e86 The rule before judged what DDP does instead of what the source says. The source "
        "names parameters and buffers, at construction and before every forward: that is four parts, the last of which "
        "was not judged."
    ),
    seconds=(3, 2),
)


class Counter(nn.Module):
    """One linear layer and a counter; notes the counter on entry to each forward."""

    cnt: Tensor

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 1)
        nn.init.constant_(self.fc.weight, rank + 1.0)
        self.register_buffer("cnt", torch.tensor(100.0 * (rank + 1)))
        self.seen: list[float] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.append(float(self.cnt))
        self.cnt += 1
        outputs: Tensor = self.fc(inputs)
        return outputs


def measure(setting: Setting) -> Measurements:
    """What each rank saw, by number of ranks and whether buffers are broadcast."""
    load, by_ranks = claim.load(setting), {}
    for count in load.ranks:
        seen = run_ranks(observe, count, load.forwards)
        by_ranks[str(count)] = {switch: [rank[switch] for rank in seen] for switch in ("on", "off")}
    return {"by_ranks": by_ranks}


def observe(rank: int, world_size: int, forwards: int) -> dict[str, Any]:
    """One rank's parameters and counters, with the broadcast of buffers on and off."""
    return {switch: _observe(rank, switch == "on", forwards) for switch in ("on", "off")}


def _observe(rank: int, broadcast_buffers: bool, forwards: int) -> dict[str, Any]:
    model = Counter(rank)
    module = DistributedDataParallel(model, broadcast_buffers=broadcast_buffers)
    constructed = model.fc.weight.flatten().tolist()
    counter = float(model.cnt)
    for _ in range(forwards):
        module(torch.ones(2, 3)).sum().backward()
        model.cnt += 10 * rank
    with torch.no_grad():
        model.fc.weight += rank
    module(torch.ones(2, 3))
    dist.all_reduce(torch.zeros(1))
    return {
        "weights": constructed,
        "counter_after_construction": counter,
        "counters": model.seen[:forwards],
        "weights_changed": model.fc.weight.flatten().tolist(),
    }


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    cases = list(measurements["by_ranks"].values())
    weights = all(_same(case[switch], "weights") for case in cases for switch in ("on", "off"))
    counter = all(_same(case["on"], "counter_after_construction") for case in cases)
    on = all(_same(case["on"], "counters") for case in cases)
    off = all(_all_differ(case["off"], "counters") for case in cases)
    mended = all(_same(case["on"], "weights_changed") for case in cases)
    names = [
        f"{what} {when}" for when in ("at construction", "before every forward") for what in ("parameters", "buffers")
    ]
    figures = [
        Figure("equal after construction", weights, part=names[0]),
        Figure("equal after construction, broadcast_buffers on", counter, part=names[1]),
        Figure("equal on entry to each forward, broadcast_buffers on", on, part=names[3]),
        Figure("different on entry to each forward, broadcast_buffers off", off, part=names[3]),
        Figure("equal again after the next forward, when ranks have changed them", mended, part=names[2]),
    ]
    ranks = f"on {' and '.join(measurements['by_ranks'])} ranks"
    same, other = (f"{ranks} {found} after construction" for found in ("equal", "different"))
    switched = f"{'equal' if on else 'different'} with broadcast_buffers on, {'different' if off else 'equal'} off"
    parts = [
        holds(names[0], weights, same, other),
        holds(names[1], counter, same, other),
        holds(names[3], on and off, "equal with broadcast_buffers on, different with it off", switched),
        holds(names[2], mended, "ranks that differ are made equal", "not sent again: a changed one stays changed"),
    ]
    return composed(parts, figures)


def _same(ranks: list[dict[str, Any]], name: str) -> bool:
    return all(rank[name] == ranks[0][name] for rank in ranks)


def _all_differ(ranks: list[dict[str, Any]], name: str) -> bool:
    moments = zip(*(rank[name] for rank in ranks), strict=True)
    return all(len(set(values)) == len(values) for values in moments)

"""What DDP copies from rank 0, and when.

Construction broadcasts rank 0's parameters, and its buffers too unless `broadcast_buffers=False`: whatever the ranks
started with, all go on with rank 0's values. After that, parameters are never sent again. They stay equal because every
rank applies the same mean gradient to the same values. If one rank changes a parameter on its own, it stays different,
and nothing reports it. Buffers (BatchNorm's running mean, a counter) have no gradient that could keep them equal, so
DDP copies rank 0's buffers before each forward; what the other ranks wrote into theirs is lost. Source 000 says
"parameters and buffers ... before every forward"; for parameters that is not so.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_lab.claims.framework.claim import Claim, Judgement, Measurements
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.measuring.ranks import run_ranks
from ddp_lab.records import Figure

claim = Claim(
    id="C03",
    title="DDP broadcasts rank 0's parameters at construction, its buffers before every forward",
    claim="DDP broadcasts rank 0's parameters at construction and its buffers before every forward.",
    original="DDP在构建及每次前向传递开始前会同步各进程之间的parameters及buffers"
    "（DistributedDataParallel类的\\_\\_init\\_\\_及forward方法中）\n"
    "广播权重(Broadcast):训练开始时,Rank 0 节点的模型权重被广播到所有其他节点,确保初始状态一致。",
    sources=("000", "004"),
    method="Every rank starts with different weights and a different counter `cnt`, and adds a different amount to its "
    "counter after each forward. Looked at: the parameters after construction, the counter on entry to each forward, "
    "with broadcast_buffers on and off; and whether the next forward mends a parameter that one rank has changed.",
    rule="Confirmed when parameters are equal on all ranks after construction, and on entry to each forward the "
    "counters are equal with broadcast_buffers on and different with it off. Otherwise refuted.",
    seconds=(3, 5),
)

FORWARDS = 3


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
    """What each rank saw, by number of ranks."""
    return {"by_ranks": {str(count): _by_switch(count) for count in setting.choose((2,), (2, 4))}}


def _by_switch(count: int) -> dict[str, Any]:
    seen = run_ranks(observe, count)
    return {switch: [rank[switch] for rank in seen] for switch in ("on", "off")}


def observe(rank: int, world_size: int) -> dict[str, Any]:
    """One rank's parameters and counters, with the broadcast of buffers on and off."""
    return {switch: _observe(rank, switch == "on") for switch in ("on", "off")}


def _observe(rank: int, broadcast_buffers: bool) -> dict[str, Any]:
    model = Counter(rank)
    module = DistributedDataParallel(model, broadcast_buffers=broadcast_buffers)
    constructed = model.fc.weight.flatten().tolist()
    counter = float(model.cnt)
    for _ in range(FORWARDS):
        module(torch.ones(2, 3)).sum().backward()
        model.cnt += 10 * rank
    with torch.no_grad():
        model.fc.weight += rank
    module(torch.ones(2, 3))
    dist.all_reduce(torch.zeros(1))
    return {
        "weights": constructed,
        "counter_after_construction": counter,
        "counters": model.seen[:FORWARDS],
        "weights_changed": model.fc.weight.flatten().tolist(),
    }


def judge(measurements: Measurements) -> Judgement:
    """Apply the rule of the claim."""
    cases = list(measurements["by_ranks"].values())
    weights = all(_same(case[switch], "weights") for case in cases for switch in ("on", "off"))
    on = all(_same(case["on"], "counters") for case in cases)
    off = all(_all_differ(case["off"], "counters") for case in cases)
    mended = all(_same(case["on"], "weights_changed") for case in cases)
    figures = [
        Figure("parameters equal after construction", weights),
        Figure("buffers equal on entry to each forward, broadcast_buffers on", on),
        Figure("buffers different on entry to each forward, broadcast_buffers off", off),
        Figure("a parameter that one rank changed is mended by the next forward", mended),
    ]
    ranks = " and ".join(measurements["by_ranks"])
    if weights and on and off:
        rest = "" if mended else "; parameters are not sent again: a changed one stays changed"
        return Judgement(
            "confirmed",
            f"on {ranks} ranks parameters are equal after construction, and buffers before each forward only with "
            f"broadcast_buffers on{rest}",
            figures,
        )
    failed = [str(figure.name) for figure in figures[:3] if not figure.value]
    return Judgement("refuted", f"on {ranks} ranks this did not hold: {'; '.join(failed)}", figures)


def _same(ranks: list[dict[str, Any]], name: str) -> bool:
    return all(rank[name] == ranks[0][name] for rank in ranks)


def _all_differ(ranks: list[dict[str, Any]], name: str) -> bool:
    moments = zip(*(rank[name] for rank in ranks), strict=True)
    return all(len(set(values)) == len(values) for values in moments)

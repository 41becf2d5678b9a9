"""Ranks that do not agree on what the bits of a sum depend on are refused, on all of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_core.reduction import ExactReduction
from tests.support.thread_group import on_thread_world

NET = nn.Sequential(nn.Conv2d(2, 3, 3))
FIRST = "parameter 0 is 0.weight, torch.float32 (3, 2, 3, 3) on rank 0, but 0.weight, torch.float"
REFUSED = {
    "nothing": "",
    "threads": "threads is 1 on rank 0, but 2 on rank 2",
    "micro-batches": "micro_batches is 4 on rank 0, but 2 on rank 2",
    "shares": "shares is contiguous on rank 0, but strided on rank 2",
    "shape": f"{FIRST}32 (4, 2, 3, 3)",
    "memory": f"{FIRST}32 (3, 2, 3, 3), strides",
    "type": f"{FIRST}64 (3, 2, 3, 3)",
    "number": "parameters is 2 on rank 0, but 1 on rank 2",
    "weights": "before the first step 0.weight is not the same on all ranks (differs: 2 of 3)",
    "update": "after step 1 of this start 0.weight is not the same on all ranks (differs: 2 of 3)",
    "scale": "step 1 of this start: `finish` has another scale on another rank",
}


@pytest.mark.parametrize("what", REFUSED)
def test_ranks_that_do_not_agree_are_refused_everywhere(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1 + (what == "threads" and dist.get_rank() == 2))
    wide = nn.Sequential(nn.Conv2d(2, 4, 3))

    def told(group: Any) -> str:
        odd = what if group.rank() == 2 else ""
        net = copy.deepcopy(wide if odd == "shape" else NET)
        net.to(torch.float64 if odd == "type" else torch.float32)
        if odd == "memory":
            net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        net[0].bias.requires_grad = odd != "number"
        net[0].weight.data += odd == "weights"
        shares: Any = "strided" if odd == "shares" or what == "weights" else "contiguous"
        try:
            with ExactReduction(net, 2 if odd == "micro-batches" else 4, process_group=group, shares=shares) as exact:
                exact.begin()
                for index in exact.share:
                    with exact.micro_batch(index):
                        net(torch.ones(1, 2, 3, 3)).sum().backward()
                exact.finish(scale=1 + 2**-52 * (odd == "scale"))
                torch.optim.SGD(net.parameters(), 0.1 + (odd == "update")).step()
                exact.begin()
        except ValueError as error:
            return str(error)
        return ""

    found = [each.partition(", 1")[0] for each in on_thread_world(3, told)]  # each rank says its own scale
    assert found == found[:1] * 3
    assert REFUSED[what] in found[0]
    assert bool(found[0]) == bool(REFUSED[what])


def test_a_rank_alone_may_begin_a_step_again() -> None:
    def steps(group: Any) -> int:
        with ExactReduction(copy.deepcopy(NET), 2, process_group=group) as exact:
            for _ in range(3):
                for _ in range(1 + group.rank()):
                    exact.begin()
                with exact.micro_batch(group.rank()):
                    exact.module(torch.ones(1, 2, 3, 3)).sum().backward()
                exact.finish()
            return exact._steps

    assert on_thread_world(2, steps) == [3, 3]

"""Under DistributedDataParallel a few trainings on two ranks end with the bits of one process."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel.distributed import _MixedPrecision

from ddp_core.reduction import ExactReduction
from tests.distributed import exact_cases as cases
from tests.support.processes import run_processes

SHORT = {"micro_batches": 5, "steps": (5, 1, 2, 5)}
"""For two ranks: several subtrees, one leaf, none."""
UNUSED = {"find_unused_parameters": True, **cases.TINY_BUCKETS}
CASES = {
    "buckets": cases.Case(ddp={"gradient_as_bucket_view": True, **cases.TINY_BUCKETS}, **SHORT),
    "static graph": cases.Case(ddp={"static_graph": True}, **SHORT),
    "unused": cases.Case(
        lambda: cases.RandomNet(random.Random(3), True), (6,), ddp=UNUSED, micro_batches=8, steps=(8, 1, 3, 8)
    ),
}


def on_two_ranks(rank: int, world_size: int) -> tuple[dict[Any, Any], list[str]]:
    """The digests by case and way; what is refused."""
    found: dict[Any, Any] = {}
    refused = []
    with cases.process_group():
        for name, case in CASES.items():
            found[name] = cases.train(case, world_size)
        found["strided"] = [cases.train(CASES[name], world_size, "strided") for name in ("buckets", "static graph")]
        norm = torch.nn.BatchNorm1d(2)
        for module in (
            torch.nn.parallel.DistributedDataParallel(norm),
            cases.wrap(torch.nn.Linear(2, 2), mixed_precision=_MixedPrecision()),
        ):
            try:
                ExactReduction(module, 4)
            except ValueError as error:
                refused.append(str(error))
        net = cases.wrap(torch.nn.Linear(2, 2))
        with ExactReduction(net, 4) as exact:
            assert exact.module is net
            net(torch.ones(1, 2)).sum()
            try:
                net(torch.ones(1, 2)).sum().backward()
            except RuntimeError as error:
                refused.append(str(error))
            dist.barrier()
    return found, refused


def test_a_few_trainings_end_with_the_bits_of_one_process() -> None:
    torch.set_num_threads(1)
    expected = {name: cases.train(case, 0) for name, case in CASES.items()}
    for found, refused in run_processes(on_two_ranks, 2):
        assert {name: found[name] for name in CASES} == expected
        assert found["strided"] == [expected["buckets"], expected["static graph"]]
        assert [
            words in message
            for words, message in zip(
                ("broadcast_buffers=False", "mixed_precision is not exact", "backward outside ExactReduction"),
                refused,
                strict=True,
            )
        ] == [True] * 3

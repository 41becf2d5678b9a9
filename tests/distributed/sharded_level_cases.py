"""What worker processes of test_two_levels.py run with shards; a file of its own, since FSDP takes a second to load."""

from __future__ import annotations

from typing import Any
from unittest import mock

from ddp_core.reduction.messages import PointToPoint
from tests.distributed import fully_sharded_cases as rows_cases
from tests.distributed import sharded_cases as pieces_cases
from tests.distributed.exact_cases import process_group
from tests.distributed.level_cases import node_of

PIECES = ("fused adamw, clipped", "momentum", "a large layer", "fewer elements than ranks")
ROWS = ("incomplete batches", "clipped", "sometimes unused")


def with_shards(rank: int, world_size: int, world: str, thorough: bool) -> dict[str, list[Any]]:
    """The digests of trainings with shards on nodes; on rank 0 each begins with that of one process."""
    digests: dict[str, list[Any]] = {}
    node, in_parts = node_of(rank, world), mock.patch.object(PointToPoint, "one_round_bytes", -1)
    with process_group(), in_parts:
        for name in PIECES if thorough else PIECES[:1]:
            digests[name] = of_rank(rank, pieces_cases.TRAININGS[name], pieces_cases.WAYS, node)
        for name in ROWS if thorough else ROWS[:1]:
            digests[f"rows: {name}"] = of_rank(rank, rows_cases.CASES[name], ("rows",), node)
    return digests


def of_rank(rank: int, case: pieces_cases.Case, ways: tuple[pieces_cases.Way, ...], node: int) -> list[Any]:
    """Weights and the optimizer's state on rank 0, first those of one process; of other ranks the weights."""
    if rank == 0:
        return [pieces_cases.trained(case, way, node)[0] for way in (None, *ways)]
    return [pieces_cases.trained(case, way, node)[0][0] for way in ways]

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
            for way in (None, *pieces_cases.WAYS) if rank == 0 else pieces_cases.WAYS:
                training = pieces_cases.Training(pieces_cases.TRAININGS[name], way, node=node)
                training.run()
                weights, state = training.digest()
                digests.setdefault(name, []).append((weights, state) if rank == 0 else weights)
                training.close()
                del training
        for name in ROWS if thorough else ROWS[:1]:
            for size in (0, world_size) if rank == 0 else (world_size,):
                with rows_cases.training(rows_cases.CASES[name], size, node=node) as made:
                    made.train()
                    if (state := made.state()) is not None:
                        digests.setdefault(f"rows: {name}", []).append(rows_cases.digest_of(state))
    return digests

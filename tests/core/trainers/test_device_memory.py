"""A lack of device memory that nobody tells of: it ends the run, and what comes near it is said once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.world import World
from ddp_core.trainers.checks import DeviceMemory
from tests.support.wording import refusing


class TwoRanks(Collectives):
    """This one, and another with these counts."""

    others: tuple[int, int] = (0, 0)

    def gather(self, value: Any) -> list[Any]:
        return [value, ("rank 1 (node 0)", *self.others)]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    found: dict[str, int] = {"num_ooms": 3, "num_alloc_retries": 1}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: found)
    return found


def test_what_was_before_does_not_count_and_what_is_nearly_full_is_said_once(counts: dict[str, int]) -> None:
    collectives = TwoRanks(World(), torch.device("cuda", 0))
    memory = DeviceMemory(collectives)
    assert memory.require_enough(4) is None
    counts["num_alloc_retries"] += 1
    said = memory.require_enough(8)
    assert said.startswith("warning: rank 0 (node 0): the device's memory is nearly full")
    assert memory.require_enough(16) is None


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lack_that_nobody_has_told_of_ends_the_run_on_every_rank(counts: dict[str, int], rank: int) -> None:
    collectives = TwoRanks(World(), torch.device("cuda", 0))
    memory = DeviceMemory(collectives)
    if rank:
        collectives.others = (2, 1)
    else:
        counts["num_ooms"] += 1
    with refusing():
        memory.require_enough(8)

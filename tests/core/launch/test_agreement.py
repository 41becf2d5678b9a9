"""Launchers of several nodes compare their requests before a worker starts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from ddp_core.base.errors import UserError
from ddp_core.cli.prepare import prepare
from ddp_core.config.options import Asked
from ddp_core.launch.agreement import facts_of_nodes, require_same_request
from tests.support.processes import HANG


def compared(*facts: dict[str, str]) -> list[str | None]:
    """What each node is told, None where it goes on."""
    store = HashStore()

    def node(rank: int) -> str | None:
        place: Any = SimpleNamespace(store=store, group_rank=rank, group_world_size=len(facts))
        try:
            require_same_request(place, facts[rank])
        except UserError as error:
            return f"{error} ({error.exit_code})"
        return None

    with ThreadPoolExecutor(len(facts)) as pool:
        return list(pool.map(node, range(len(facts)), timeout=HANG))


def facts(*words: str, **more: Any) -> dict[str, str]:
    return facts_of_nodes(
        prepare(Asked(experiment="toy_mlp", layout="ddp", device="cpu", settings=words, **more), "ddp")
    )


def test_equal_requests_pass_also_where_folders_differ() -> None:
    assert compared(facts(), facts(output="elsewhere", data_dir="there", faults=("kill@3:1",))) == [None, None]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"reduction": "plain"}, "reduction"),
        ({"nproc_per_node": 3}, "layout"),
        ({"checkpoint_every": 7}, "--checkpoint-every"),
    ],
)
def test_another_request_is_named_on_every_node(other: dict[str, Any], named: str) -> None:
    told = f"node 2 has another {named} than node 0: start every node with the same code and the same command (2)"
    assert compared(facts(), facts(), facts(**other)) == [told] * 3


def test_another_setting_is_another_experiment() -> None:
    (first, second) = compared(facts("epochs=3"), facts("epochs=4"))
    assert first == second
    assert "another experiment than node 0" in (first or "")

"""How nodes meet, and that they compare their requests before a worker starts.

torch ignores unknown settings silently, so the tests read back what it made of each setting.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.torch_internals import end_keep_alives
from ddp_core.cli.prepare import prepare
from ddp_core.config.options import Asked
from ddp_core.distributed.world import free_port
from ddp_core.launch import meeting
from ddp_core.launch.meeting import facts_of_nodes, join, own_address, require_same_request
from ddp_core.launch.nodes import Meeting, RendezvousLost
from tests.support.processes import HANG


def test_torch_has_understood_the_settings() -> None:
    meeting = Meeting(1, 3, launch_id="settings")
    handler = join(meeting, own_address(meeting), join_seconds=77)
    try:
        assert isinstance(handler, DynamicRendezvousHandler)
        settings = handler.settings
        assert (settings.run_id, settings.min_nodes, settings.max_nodes) == ("settings", 1, 3)
        assert settings.timeout.join == timedelta(seconds=77)
        assert settings.timeout.last_call == timedelta(seconds=2)
        assert (settings.keep_alive_interval, settings.keep_alive_max_attempt) == (timedelta(seconds=1), 3)
    finally:
        handler.shutdown()


def test_nodes_are_told_one_port_for_the_workers_and_none_that_the_system_gives_to_a_connection() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    endpoint = f"127.0.0.1:{free_port()}"

    def node(is_host: bool) -> tuple[RendezvousHandler, RendezvousInfo]:
        handler = join(Meeting(2, 2, endpoint, "ports", is_host), "127.0.0.1", join_seconds=HANG)
        return handler, handler.next_rendezvous()

    with ThreadPoolExecutor(2) as pool:
        met = list(pool.map(node, [True, False], timeout=HANG))
    for handler, _ in met:
        end_keep_alives(handler, HANG)
    one, other = ((told.bootstrap_store_info.master_addr, told.bootstrap_store_info.master_port) for _, told in met)
    assert one == other
    assert one[0] == "127.0.0.1"
    assert one[1] < first


@pytest.mark.parametrize("endpoint", ["store", ":1234", "store:", "store:port"])
def test_an_endpoint_is_a_host_and_a_port(endpoint: str) -> None:
    with pytest.raises(UserError, match="expected HOST:PORT") as raised:
        own_address(Meeting(endpoint=endpoint))
    assert raised.value.exit_code == ExitCode.BAD_INPUT


def test_a_name_that_nobody_knows_may_be_known_later() -> None:
    with pytest.raises(RendezvousLost, match="the rendezvous at nowhere"):
        own_address(Meeting(endpoint="nowhere.invalid:1234"))


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


@pytest.mark.parametrize(("answers", "left_at"), [([True] * 20, None), ([True] * 5 + [False] * 20, 18.0)])
def test_a_node_is_cut_off_when_nothing_has_answered_for_so_long(
    monkeypatch: pytest.MonkeyPatch, answers: list[bool], left_at: float | None
) -> None:
    now, asked, exits = [0.0], iter(answers), []

    def wait(seconds: float) -> bool:
        now[0] += seconds
        return now[0] > 2 * len(answers) or bool(exits)

    def connect(*_: object) -> None:
        if not next(asked):
            raise TimeoutError

    monkeypatch.setattr(meeting, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(meeting, "_connect", connect)
    monkeypatch.setattr(meeting.os, "_exit", lambda code: exits.append((code, now[0])))
    done: Any = SimpleNamespace(wait=wait, is_set=lambda: False)
    ended: list[float] = []
    meeting._watch("store:1", 7.0, lambda: ended.append(now[0]), done)
    assert exits == ([] if left_at is None else [(ExitCode.PEERS_LOST, left_at)])
    assert ended == ([] if left_at is None else [left_at])

"""Stores listen where peers come from, and nowhere else: real sockets, and the kernel says where they listen."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.distributed import addresses
from ddp_core.distributed.addresses import address_served, give_up_silence, gloo_towards, listen_at, store_on
from ddp_core.distributed.process_group import process_group
from ddp_core.distributed.world import World
from ddp_core.launch.meeting import join
from ddp_core.launch.nodes import Meeting
from tests.support.processes import ask, free_port, run_processes

ELSEWHERE = "192.0.2.77"
"""An address that no machine has (RFC 5737)."""


def listening() -> set[str]:
    """The addresses at which this process listens."""
    return {entry.laddr.ip for entry in psutil.Process().net_connections("tcp") if entry.status == "LISTEN"}


def _served(address: str | None) -> tuple[set[str], bool]:
    store = store_on(listen_at(address, 0), 20)
    store.set("key", "value")
    return listening(), store.get("key") == b"value"


@pytest.mark.parametrize(
    ("address", "expected"), [("127.0.0.1", {"127.0.0.1"}), ("127.0.0.5", {"127.0.0.5"}), (None, {"::"})]
)
def test_a_store_listens_at_its_address_alone(address: str | None, expected: set[str]) -> None:
    if address is None and not socket.has_dualstack_ipv6():
        expected = {"0.0.0.0"}
    assert ask(_served, address) == (expected, True)


def test_an_address_of_another_machine_is_bad_input() -> None:
    with pytest.raises(UserError, match=rf"has the address {ELSEWHERE}; there are: .*127\.0\.0\.1 \(lo") as raised:
        listen_at(ELSEWHERE, 0)
    assert raised.value.exit_code == ExitCode.BAD_INPUT


def test_a_port_in_use_is_named_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        with pytest.raises(UserError, match=f"^PORT={port} is in use; take another$") as raised:
            listen_at("127.0.0.1", port, "PORT={port}", "take another")
    assert raised.value.exit_code == ExitCode.RESOURCES


def names(found: dict[str, list[str]]) -> Callable[..., list[tuple[object, ...]]]:
    """A getaddrinfo that knows these names alone."""

    def look_up(host: str, port: int | None, type: int = socket.SOCK_STREAM) -> list[tuple[object, ...]]:
        if host not in found:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, type, 0, "", (address, port or 0)) for address in found[host]]

    return look_up


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        ("here", None),  # Debian's own name for itself is 127.0.1.1
        ("away", None),
        ("two", None),
        ("unknown", None),
    ],
)
def test_a_name_tells_the_address_or_does_not(host: str, expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        "127.0.0.1": ["127.0.0.1"],
        "localhost": ["127.0.0.1", "127.0.0.2"],
        "here": ["127.0.1.1"],
        "away": [ELSEWHERE],
        "two": ["127.0.0.1", ELSEWHERE],
    }
    monkeypatch.setattr(addresses.socket, "getaddrinfo", names(known))
    assert address_served(host) == expected


def test_a_name_of_an_interface_tells_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not by asking where ELSEWHERE is: a network without a way out has no answer.
    here = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries]
    own = next((address for address in here if "." in address and not address.startswith("127.")), "127.0.0.1")
    monkeypatch.setattr(addresses.socket, "getaddrinfo", names({"node": [own]}))
    assert address_served("node") == (None if own.startswith("127.") else own)


@pytest.mark.parametrize(
    ("host", "elsewhere", "given", "expected"),
    [
        ("127.0.0.1", True, None, "lo"),
        ("127.0.0.1", False, None, "lo"),
        ("here", False, None, "lo"),
        ("here", True, None, None),
        ("unknown", True, None, None),
        (None, False, None, None),
        ("unknown", True, "lo", "lo"),
    ],
)
def test_gloo_is_told_the_interface(
    host: str | None, elsewhere: bool, given: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if given is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
    known = {"127.0.0.1": ["127.0.0.1"], "here": ["127.0.1.1"]}
    monkeypatch.setattr(addresses.socket, "getaddrinfo", names(known))
    with gloo_towards(host, elsewhere):
        assert os.environ.get("GLOO_SOCKET_IFNAME") == expected
    assert os.environ.get("GLOO_SOCKET_IFNAME") == given


def _meet(rank: int, world_size: int) -> set[str]:
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    with process_group(World.from_environment(), torch.device("cpu"), 20) as collectives:
        collectives.barrier()
        return listening()


def test_ranks_of_one_machine_listen_on_loopback_alone() -> None:
    # The store of rank 0, and gloo's socket of each rank.
    assert run_processes(_meet, 2) == [{"127.0.0.1"}, {"127.0.0.1"}]


def _host(endpoint: str | None) -> set[str]:
    handler = join(Meeting(1, 1, endpoint, "test", endpoint is not None), "127.0.0.1", join_seconds=20)
    found = listening()
    handler.shutdown()
    return found


@pytest.mark.parametrize("named", [None, "localhost"])
def test_a_node_that_the_others_meet_at_listens_at_its_address(named: str | None) -> None:
    assert ask(_host, named and f"{named}:{free_port()}") == {"127.0.0.1"}


def _encrypted() -> None:
    os.environ["GLOO_DEVICE_TRANSPORT"] = "TCP_TLS"
    with pytest.raises(RuntimeError, match="unsupported gloo device"):
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


def test_gloo_cannot_encrypt() -> None:
    """As docs/explanation/security.md says. When this fails, torch can: change the page."""
    ask(_encrypted)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="Linux tells of a process's connections there")
def test_connections_to_a_port_fail_when_its_machine_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as elsewhere:
        port = server.getsockname()[1]
        with (
            socket.create_connection(server.getsockname()) as ours,
            socket.create_connection(elsewhere.getsockname()) as other,
        ):
            give_up_silence(port, 10)
            limits = [each.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for each in (ours, other)]
            assert limits == [10_000, 0]
            assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1

"""How the nodes of a launch meet: each gives its address, joins torch's rendezvous, and compares its request.

torch's rendezvous has settings here that were tried: short keep-alives, nodes known by address and not by host name,
and a lost rendezvous is one error of its own. A node that is cut off from it later is ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import cast

from torch.distributed import DistError, Store, TCPStore
from torch.distributed.elastic.agent.server.api import WorkerGroup
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.distributed.addresses import address_served, address_towards, listen_at, names_loopback, store_on
from ddp_core.distributed.reports import tell_user
from ddp_core.distributed.world import free_port
from ddp_core.experiment.request import Request
from ddp_core.launch.nodes import Meeting, RendezvousLost
from ddp_core.record.environment import facts_of

_ANSWER_SECONDS = 10
_READ_SECONDS = 30
_PROBE_SECONDS = 2.0
_LOOPBACK = "127.0.0.1"
_WORKERS_PORT = "workers_port"
_ELSEWHERE = "192.0.2.1"
"""An address that no machine has (RFC 5737)."""
_OF_ONE_NODE = {"data_dir", "faults", "log_to", "output", "profile", "workers"}
"""Options that may differ between nodes: folders, what only rank 0 does, and faults made on purpose."""


def own_address(meeting: Meeting) -> str:
    """The address by which peers reach this node: the one that it would use towards the rendezvous."""
    if meeting.endpoint is None:
        return _LOOPBACK
    host, _, port = meeting.endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"--rdzv-endpoint {meeting.endpoint}: expected HOST:PORT", ExitCode.BAD_INPUT)
    try:
        address = address_towards(host, int(port))
    except OSError as error:
        # A container's name is known only while it runs, and a node that is cut off knows none: both may come back.
        raise RendezvousLost(meeting.endpoint, error) from None
    # The host of the rendezvous may know its own name as a loopback address, as Debian does: it takes the address that
    # it would use towards another network, if there is any.
    if meeting.is_host and names_loopback(host, address):
        with contextlib.suppress(OSError):
            return address_towards(_ELSEWHERE)
    return address


class _Rendezvous(DynamicRendezvousHandler):
    """torch's rendezvous, with another port for the store of a round's workers."""

    def next_rendezvous(self) -> RendezvousInfo:
        """See torch. Raises RendezvousError and DistError as torch's does."""
        round_ = super().next_rendezvous()
        # torch names a port that the system may give to a connection before rank 0 listens, seconds later.
        if round_.rank == 0:
            round_.store.set(_WORKERS_PORT, str(free_port()))
        assert round_.bootstrap_store_info is not None
        told = RendezvousStoreInfo(round_.bootstrap_store_info.master_addr, int(round_.store.get(_WORKERS_PORT)))
        return RendezvousInfo(round_.store, round_.rank, round_.world_size, told)


def join(meeting: Meeting, address: str, join_seconds: int) -> RendezvousHandler:
    """Reach the place where the nodes of this launch meet, by torch's rendezvous; wait so long for the least number."""
    assert meeting.launch_id is not None
    store = reach(meeting)
    try:
        handler = _Rendezvous.from_backend(
            meeting.launch_id,
            store,
            C10dRendezvousBackend(store, meeting.launch_id),
            meeting.min_nodes,
            meeting.max_nodes,
            address,
            RendezvousTimeout(join=timedelta(seconds=join_seconds), last_call=timedelta(seconds=2)),
            keep_alive_interval=1,
            keep_alive_max_attempt=3,
        )
    except (RendezvousError, DistError) as error:
        raise RendezvousLost(meeting.endpoint, error) from None
    assert isinstance(handler, RendezvousHandler)
    return handler


def reach(meeting: Meeting) -> TCPStore:
    """The store where the nodes meet; a host makes it, or one alone. Raises RendezvousLost, and UserError (4)."""
    try:
        if meeting.endpoint is None:
            return store_on(listen_at(_LOOPBACK, 0), _READ_SECONDS)
        host, _, port = meeting.endpoint.rpartition(":")
        if meeting.is_host:
            listening = listen_at(address_served(host), int(port), remedy="give another with --rdzv-endpoint")
            return store_on(listening, _READ_SECONDS)
        _await_answer(meeting.endpoint)
        return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=_READ_SECONDS))
    except DistError as error:
        raise RendezvousLost(meeting.endpoint, error) from None


def _await_answer(endpoint: str) -> None:
    """Wait until somebody listens at the endpoint; torch would wait for a minute, and show its call stack."""
    deadline = time.monotonic() + _ANSWER_SECONDS
    while True:
        try:
            return _connect(endpoint, 1)
        except OSError as error:
            if time.monotonic() > deadline:
                raise RendezvousLost(endpoint, error) from None
        time.sleep(0.2)


def _connect(endpoint: str, timeout: float) -> None:
    """Raises OSError where nobody listens at the endpoint."""
    host, _, port = endpoint.rpartition(":")
    socket.create_connection((host, int(port)), timeout=timeout).close()


def facts_of_nodes(request: Request) -> dict[str, str]:
    """What all nodes of a launch must have in common, by the name that an error message gives it."""
    options = {f"--{name.replace('_', '-')}": str(value) for name, value in request.options if name not in _OF_ONE_NODE}
    return {**facts_of(request), "experiment file": request.source_sha256, **options}


def note_request(store: Store, node: int, facts: Mapping[str, str]) -> None:
    """Let the other nodes compare what this one is to train (`facts_of_nodes`) with what they are."""
    store.set(f"ddp/request/{node}", json.dumps(facts))


def require_same_request(nodes: WorkerGroup, facts: Mapping[str, str], compared: Iterable[int] | None = None) -> None:
    """Raises UserError on every node where a fact differs between the nodes that have met. Waits for all of them.

    `nodes`: how torch's agent notes a round of the rendezvous; its store is the same for all nodes of the round.
    `compared`: the nodes with which this one is compared, where these are not all of the round.
    """
    # torch declares these as None, which they are until the nodes have met.
    store, node_rank, count = cast("tuple[Store, int, int]", (nodes.store, nodes.group_rank, nodes.group_world_size))
    note_request(store, node_rank, facts)
    everybody = sorted({node_rank, *(range(count) if compared is None else compared)})
    seen = {node: json.loads(store.get(f"ddp/request/{node}")) for node in everybody}
    chief = everybody[0]
    for name, first in seen[chief].items():
        other = [str(node) for node, theirs in seen.items() if theirs.get(name) != first]
        if other:
            have = f"node {other[0]} has" if len(other) == 1 else f"nodes {', '.join(other)} have"
            raise UserError(
                f"{have} another {name} than node {chief}: start every node with the same code and the same command"
            )


@contextlib.contextmanager
def leaves_when_cut_off(endpoint: str | None, patience: float, end_workers: Callable[[], None]) -> Iterator[None]:
    """While in the block, ends this process with 6 when nothing answers at `endpoint` for `patience` seconds."""
    # torch's store has no time limit for an answer that never comes. It notices at once a connection that is closed,
    # but on a node that is cut off from the network the agent would wait for ever, and its workers with it.
    if endpoint is None:
        yield
        return
    done = threading.Event()
    watch = threading.Thread(target=_watch, args=(endpoint, patience, end_workers, done), daemon=True)
    watch.start()
    try:
        yield
    finally:
        done.set()


def _watch(endpoint: str, patience: float, end_workers: Callable[[], None], done: threading.Event) -> None:
    answered = time.monotonic()
    while not done.wait(_PROBE_SECONDS):
        with contextlib.suppress(OSError):
            _connect(endpoint, _PROBE_SECONDS)
            answered = time.monotonic()
        if time.monotonic() - answered > patience and not done.is_set():
            tell_user(
                f"error: the rendezvous at {endpoint} has not answered for {patience:.0f} s: this node is cut off "
                "and leaves; start it again when the network is back"
            )
            end_workers()
            os._exit(ExitCode.PEERS_LOST)

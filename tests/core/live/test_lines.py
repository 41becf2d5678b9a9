"""Connections between launchers: the end of one is seen at once, and silence after a while."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch.distributed as dist

from ddp_core.live import lines
from ddp_core.live.lines import Lines
from ddp_core.live.members import Members
from ddp_core.live.membership import Membership
from tests.support.commands import wait_until

SOON = 20.0


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=SOON))


@pytest.fixture
def members(store: dist.TCPStore) -> Members:
    members = Members(store)
    members.begin(Membership(0, ("0.0@0", "0.0@1")))
    return members


def other_launcher(port: int, ready: Connection) -> None:
    """A launcher of node 1 that only waits."""
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=SOON), wait_for_workers=False)
    kept = Lines(1, "127.0.0.1", Members(store))
    ready.send(True)
    time.sleep(60)
    kept.close()


@pytest.mark.full
def test_a_launcher_that_is_killed_is_seen(store: dist.TCPStore, members: Members) -> None:
    ours = Lines(0, "127.0.0.1", members)
    context = multiprocessing.get_context("spawn")
    ready, theirs = context.Pipe()
    process = context.Process(target=other_launcher, args=(store.port, theirs), daemon=True)
    process.start()
    assert ready.poll(SOON)
    ours.reach(members.read().launchers)
    for _ in range(20):
        assert not ours.look()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    wait_until(ours.look, SOON, "the end is seen")
    assert ours.closed == {1}
    process.join()
    ours.close()


def test_a_refused_connection_is_no_end_but_silence_is_believed_sooner(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "_BEAT_SECONDS", 0.01)
    monkeypatch.setattr(lines, "_REFUSED_SECONDS", 0.2)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # nobody listens there
        members.beat(1)
        ours = Lines(0, "127.0.0.1", members)
        ours.reach({1: f"127.0.0.1:{held.getsockname()[1]}"})
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            members.beat(1)
            ours.look()
            assert not ours.silent({1})
            time.sleep(0.01)
        assert not ours.closed

        def is_silent() -> bool:
            ours.look()
            return ours.silent({1}) == {1}

        wait_until(is_silent, SOON, "silence")
        assert not ours.closed
        ours.close()


def test_who_has_never_been_heard_is_silent_only_after_a_while_of_listening(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher is busy for seconds, with the start of its workers, before it listens."""
    monkeypatch.setattr(lines, "_SILENT_SECONDS", 0.2)
    ours = Lines(0, "127.0.0.1", members)
    time.sleep(0.3)
    assert not ours.silent({1})
    wait_until(lambda: ours.silent({1}) == {1}, SOON, "silence")
    ours.close()

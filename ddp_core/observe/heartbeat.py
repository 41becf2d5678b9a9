"""A sign of life per rank in the run directory: who is alive, at which step, how slow.

`heartbeats/rank-3.json` holds rank, node_rank, host, address, step, time, and the median, mean and 95th percentile of
the seconds that the rank itself takes for a step before it waits for others. Written at most once a second, by each
rank its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from collections import deque
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import TYPE_CHECKING, Any

from ddp_core.distributed.processes import state_of
from ddp_core.distributed.world import World
from ddp_core.errors import ExitCode, UserError
from ddp_core.files import replace_file
from ddp_core.observe.step import StepBatch, StepObserver

if TYPE_CHECKING:
    from ddp_core.observe.usage import Usage

_INTERVAL = 1.0
_REMEMBERED = 200
_SLOW = 1.5
_SILENT = 5.0
_DYING = 0.5


class Heartbeat(StepObserver):
    """Written by one rank; a step costs little except once a second, when `usage` is sampled, too."""

    def __init__(self, directory: Path, world: World, usage: Usage | None = None) -> None:
        self._usage = usage
        self._path = directory / "heartbeats" / f"rank-{world.rank}.json"
        self._path.parent.mkdir(exist_ok=True)
        self._facts = {
            "rank": world.rank,
            "node_rank": world.node_rank,
            "host": socket.gethostname(),
            "address": _address(),
            "pid": os.getpid(),
        }
        self._own_seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._step_began = time.perf_counter()
        self._own_part = 0.0
        self._next = 0.0
        self._beat(0)

    def before_wait(self) -> None:
        self._own_part = time.perf_counter() - self._step_began

    def after_step(self, batch: StepBatch) -> None:
        self._step_began = time.perf_counter()
        self._own_seconds.append(self._own_part)
        self._beat(batch.step + 1)

    def _beat(self, step: int) -> None:
        now = time.time()
        if now < self._next:
            return
        self._next = now + _INTERVAL
        if self._usage is not None:
            self._usage.sample()
        # A full disk must not end a run by way of its sign of life; the next checkpoint says it properly.
        with contextlib.suppress(OSError):
            replace_file(self._path, json.dumps(self._facts | {"step": step, "time": now} | self.speed()))

    def speed(self) -> dict[str, float]:
        """Median, mean and 95th percentile of this rank's own seconds per step.

        The mean leaves out the slowest twentieth: a hiccup makes no rank slow. A node with too little processor time
        stalls in every second or third step, which the median does not show.
        """
        if len(self._own_seconds) < 2:
            return {}
        values = sorted(self._own_seconds)
        return {
            "median_seconds": median(values),
            "mean_seconds": fmean(values[: max(1, len(values) * 19 // 20)]),
            "p95_seconds": quantiles(values, n=20)[-1],
        }


def read_heartbeats(directory: Path) -> list[dict[str, Any]]:
    """The last sign of every rank, by rank."""
    found = []
    for path in (directory / "heartbeats").glob("rank-*.json"):
        with contextlib.suppress(OSError, json.JSONDecodeError):
            found.append(json.loads(path.read_text()))
    return sorted(found, key=lambda beat: beat["rank"])


def clear_heartbeats(directory: Path) -> None:
    """Forget the ranks of an earlier attempt."""
    for path in (directory / "heartbeats").glob("rank-*.json"):
        path.unlink(missing_ok=True)


def sign_again(directory: Path, world: World) -> None:
    """Renew this rank's sign of life without a step, and note in it that this rank has noticed the loss of a peer.

    So nobody takes this rank for the lost one, even if it ends now.
    """
    path = directory / "heartbeats" / f"rank-{world.rank}.json"
    with contextlib.suppress(OSError, json.JSONDecodeError):
        beat = json.loads(path.read_text())
        replace_file(path, json.dumps(beat | {"time": time.time(), "noticed": True}))


def name_lost_peer(directory: Path, world: World, message: str) -> str:
    """Who is likely gone: a process of this host that is dead or stopped, the rank not heard of for longest, or who is
    at the address in a collective's error.
    """
    others = [beat for beat in read_heartbeats(directory) if beat["rank"] != world.rank]
    if not others:
        return "a peer"
    if here := _lost_here(directory, [beat for beat in others if beat["host"] == socket.gethostname()]):
        return here
    now = time.time()
    silent = min(others, key=lambda beat: beat["time"])
    if now - silent["time"] >= _SILENT:
        return (
            f"rank {silent['rank']} (node {silent['node_rank']}), "
            f"silent for {now - silent['time']:.0f} s since step {silent['step']},"
        )
    address = re.search(r"\[([0-9a-fA-F.:]+)\]:\d+", message)
    there = [beat for beat in others if address and beat["address"] == address[1]]
    nodes = {beat["node_rank"] for beat in there}
    if len(nodes) != 1 or nodes == {world.node_rank}:
        return "a peer"
    ranks = ", ".join(str(beat["rank"]) for beat in there)
    return f"a rank of node {nodes.pop()} (rank {ranks})" if len(there) > 1 else f"rank {ranks} (node {nodes.pop()})"


def _lost_here(directory: Path, beats: list[dict[str, Any]]) -> str | None:
    """The ranks of this host whose process is stopped or dead, without those that noticed the loss and left; a dying
    one closes its connections before it is dead.
    """
    deadline = time.monotonic() + _DYING
    while beats and time.monotonic() < deadline:
        states = {beat["rank"]: state_of(beat["pid"]) for beat in beats}
        for beat in read_heartbeats(directory):
            if beat.get("noticed"):
                states.pop(beat["rank"], None)
        for state, words in (("stopped", "which is stopped,"), ("gone", "which is dead,")):
            if found := [beat for beat in beats if states.get(beat["rank"]) == state]:
                return ", ".join(f"rank {beat['rank']} (node {beat['node_rank']})" for beat in found) + f", {words}"
        time.sleep(0.01)
    return None


def slowest(speeds: list[tuple[int, int, dict[str, float]]]) -> str | None:
    """A line about the slowest of (rank, node_rank, speed), where it stands out; None otherwise."""
    known = [(rank, node, speed) for rank, node, speed in speeds if speed]
    if len(known) < 2:
        return None
    rank, node, speed = max(known, key=lambda entry: entry[2]["mean_seconds"])
    others = median(entry[2]["mean_seconds"] for entry in known if entry[0] != rank)
    if speed["mean_seconds"] < _SLOW * others:
        return None
    return (
        f"slowest: rank {rank} (node {node}), p95 {speed['p95_seconds'] * 1e3:.0f} ms per step "
        f"before it waits for others, who take {others * 1e3:.0f} ms"
    )


def _address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


def check_health(output: Path, within: float) -> str:
    """A line about the freshest sign of life of this host's ranks below `output`.

    Raises UserError (6) where the last one is older than `within` seconds; before the first one a start-up counts as
    healthy.
    """
    host, now = socket.gethostname(), time.time()
    beats = [
        beat for run in output.glob("*/*/heartbeats") for beat in read_heartbeats(run.parent) if beat["host"] == host
    ]
    if not beats:
        return "no rank of this host has begun yet"
    last = max(beats, key=lambda beat: beat["time"])
    age = now - last["time"]
    if age > within:
        raise UserError(f"rank {last['rank']} made its last step ({last['step']}) {age:.0f} s ago", ExitCode.PEERS_LOST)
    return f"rank {last['rank']} at step {last['step']}, {age:.0f} s ago"

"""A heartbeat file per rank in the run directory: whether the rank is alive, at which step, and how slow.

`heartbeats/rank-3.json` holds rank, node_rank, host, address, pid, step, sequence, time, boot, monotonic, and median,
mean and 95th percentile of the seconds that the rank itself takes for a step before it waits for others. Each rank
writes its own file, at most once a second.

`time`, the wall clock, is for people: it may be set while a run goes on, and differs between machines. How old a
heartbeat is, other clocks tell. `monotonic` are seconds since the machine has started, for all processes and containers
of the kernel with the id `boot`. A reader on another machine compares the file's time with the time of a file that it
makes beside it, both by the clock of the file system. `sequence` counts the heartbeats of a process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import tempfile
import time
from collections import deque
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import TYPE_CHECKING, NotRequired

from typing_extensions import TypedDict

from ddp_core.base.beneath import make_folder_beneath, remove_beneath
from ddp_core.base.documents import BadDocument, Count, read_document
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import replace_file
from ddp_core.base.platforms import boot_id
from ddp_core.base.shown import shown_in
from ddp_core.distributed.processes import state_of
from ddp_core.distributed.world import World
from ddp_core.observe.step import StepBatch, StepObserver

if TYPE_CHECKING:
    from ddp_core.observe.usage import Usage

_BEAT_SECONDS = 1.0
_STEPS_KEPT = 200
_SLOW_FACTOR = 1.5
_SILENT_SECONDS = 5.0
_DYING_SECONDS = 0.5


class Beat(TypedDict):
    """The content of a heartbeat's file."""

    rank: Count
    node_rank: Count
    host: str
    address: str
    pid: Count
    step: Count
    time: float
    """Seconds since 1970, for people."""
    boot: NotRequired[str]
    monotonic: NotRequired[float]
    """Seconds on the clock of this boot."""
    sequence: NotRequired[Count]
    noticed: NotRequired[bool]
    """Whether the rank has noticed the loss of a peer."""


class Heartbeat(StepObserver):
    """Writes one rank's heartbeat, and samples `usage`, after a step, but at most once a second."""

    def __init__(self, directory: Path, world: World, usage: Usage | None = None) -> None:
        self._usage = usage
        self._root, self._path = directory, directory / "heartbeats" / f"rank-{world.rank}.json"
        make_folder_beneath(self._path.parent)
        host = socket.gethostname()
        try:
            address = socket.gethostbyname(host)
        except OSError:
            address = "127.0.0.1"
        self._facts = {
            "rank": world.rank,
            "node_rank": world.node_rank,
            "host": host,
            "address": address,
            "boot": boot_id(),
            "pid": os.getpid(),
        }
        self._sequence = 0
        self._own_seconds: deque[float] = deque(maxlen=_STEPS_KEPT)
        self._step_began = time.perf_counter()
        self._own_part: float | None = None
        self._next = 0.0
        self._beat(0)

    def before_wait(self) -> None:
        if self._own_part is None:
            self._own_part = time.perf_counter() - self._step_began

    def after_step(self, batch: StepBatch) -> None:
        self._step_began = time.perf_counter()
        self._own_seconds.append(self._own_part or 0.0)
        self._own_part = None
        if self._usage is not None:
            self._usage.step_done()
        self._beat(batch.step + 1)

    def _beat(self, step: int) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _BEAT_SECONDS
        if self._usage is not None:
            self._usage.sample()
        # A full disk must not end the run here: the next checkpoint reports it properly.
        with contextlib.suppress(OSError):
            beat = self._facts | {"step": step} | _moment(self._sequence) | self.speed()
            replace_file(self._path, json.dumps(beat), root=self._root)
            self._sequence += 1

    def speed(self) -> dict[str, float]:
        """Median, mean and 95th percentile of this rank's own seconds per step; empty before the second step."""
        # The mean leaves out the slowest twentieth, so that one slow step does not make a rank look slow. A node with
        # too little processor time stalls in every second or third step, which the mean shows and the median does not.
        if len(self._own_seconds) < 2:
            return {}
        values = sorted(self._own_seconds)
        return {
            "median_seconds": median(values),
            "mean_seconds": fmean(values[: max(1, len(values) * 19 // 20)]),
            "p95_seconds": quantiles(values, n=20)[-1],
        }


def _moment(sequence: int) -> dict[str, float]:
    return {"sequence": sequence, "time": time.time(), "monotonic": time.monotonic()}


def _age(directory: Path, beat: Beat, boot: str) -> float | None:
    """How many seconds old a heartbeat of any machine is; None where that cannot be known."""
    if beat.get("boot") == boot and (moment := beat.get("monotonic")) is not None:
        return time.monotonic() - moment
    folder = directory / "heartbeats"
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as just_made:
        return os.fstat(just_made.fileno()).st_mtime - (folder / f"rank-{beat['rank']}.json").stat().st_mtime
    return None


def read_heartbeats(directory: Path) -> list[Beat]:
    """Every rank's last heartbeat that can be read, by rank."""
    found: list[Beat] = []
    for path in (directory / "heartbeats").glob("rank-*.json"):
        with contextlib.suppress(OSError, BadDocument):
            found.append(shown_in(read_document(path, Beat)))
    return sorted(found, key=lambda beat: beat["rank"])


def clear_heartbeats(directory: Path) -> None:
    """Remove the heartbeats of an earlier attempt."""
    for path in (directory / "heartbeats").glob("rank-*.json"):
        remove_beneath(path, directory)


def renew_heartbeat(directory: Path, world: World) -> None:
    """Renew this rank's heartbeat without a step, and note in it that this rank has noticed the loss of a peer."""
    # With that note no other rank takes this rank for the lost one, even if this rank ends now.
    path = directory / "heartbeats" / f"rank-{world.rank}.json"
    with contextlib.suppress(OSError, BadDocument):
        beat = read_document(path, Beat)
        noticed = beat | _moment(beat.get("sequence", 0) + 1) | {"noticed": True}
        replace_file(path, json.dumps(noticed), root=directory)


def name_lost_peer(directory: Path, world: World, message: str) -> str:
    """The ranks that are likely gone, in words; 'a peer' where nothing tells which."""
    # Looked for in this order: the ranks of this host whose process is dead or stopped; the rank that has been silent
    # for longest; the ranks at the address in `message`, the error of a collective.
    others = [beat for beat in read_heartbeats(directory) if beat["rank"] != world.rank]
    if not others:
        return "a peer"
    if here := _lost_here(directory, [beat for beat in others if beat["host"] == socket.gethostname()]):
        return here
    boot = boot_id()
    ages = [(age, number) for number, beat in enumerate(others) if (age := _age(directory, beat, boot)) is not None]
    age, number = max(ages, default=(0.0, 0))
    if age >= _SILENT_SECONDS:
        silent = others[number]
        return (
            f"rank {silent['rank']} (node {silent['node_rank']}), silent for {age:.0f} s since step {silent['step']},"
        )
    address = re.search(r"\[([0-9a-fA-F.:]+)\]:\d+", message)
    there = [beat for beat in others if address and beat["address"] == address[1]]
    nodes = {beat["node_rank"] for beat in there}
    if len(nodes) != 1 or nodes == {world.node_rank}:
        return "a peer"
    ranks = ", ".join(str(beat["rank"]) for beat in there)
    return f"a rank of node {nodes.pop()} (rank {ranks})" if len(there) > 1 else f"rank {ranks} (node {nodes.pop()})"


def _lost_here(directory: Path, beats: list[Beat]) -> str | None:
    """The ranks among `beats` whose process is stopped or dead, in words; not those that noticed the loss and left."""
    # Looks again for half a second, because a dying process closes its connections before it is dead.
    deadline = time.monotonic() + _DYING_SECONDS
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
    """A line about the slowest of (rank, node_rank, speed), if it takes 1.5 times as long as the others; else None."""
    known = [(rank, node, speed) for rank, node, speed in speeds if speed]
    if len(known) < 2:
        return None
    rank, node, speed = max(known, key=lambda entry: entry[2]["mean_seconds"])
    others = median(entry[2]["mean_seconds"] for entry in known if entry[0] != rank)
    if speed["mean_seconds"] < _SLOW_FACTOR * others:
        return None
    return (
        f"slowest: rank {rank} (node {node}), p95 {speed['p95_seconds'] * 1e3:.0f} ms per step "
        f"before it waits for others, who take {others * 1e3:.0f} ms"
    )


def check_health(output: Path, within: float) -> str:
    """A line about the newest heartbeat of this host's ranks below `output`. Raises UserError (6) where that is old."""
    # A host without a rank counts as healthy: it is starting up, or has something else to do. Heartbeats from before
    # its machine has started, and of processes that have ended, are none.
    here = (socket.gethostname(), boot_id())
    found = [beat for run in output.glob("*/*/heartbeats") for beat in read_heartbeats(run.parent)]
    beats = [beat for beat in found if (beat["host"], beat.get("boot")) == here and "monotonic" in beat]
    beats = [beat for beat in beats if state_of(beat["pid"]) != "gone"]
    if not beats:
        return "no rank of this host trains now"
    last = max(beats, key=lambda beat: beat["monotonic"])
    age = time.monotonic() - last["monotonic"]
    if age > within:
        raise UserError(f"rank {last['rank']} made its last step ({last['step']}) {age:.0f} s ago", ExitCode.PEERS_LOST)
    return f"rank {last['rank']} at step {last['step']}, {age:.0f} s ago"

"""The ranks of a run as their heartbeats show them: how far, how fast, and how long ago."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ddp_core.distributed.processes import state_of
from ddp_core.observe.heartbeat import Beat, boot_id, read_heartbeats, slowest


@dataclass(frozen=True)
class RankSeen:
    """One rank, by its last heartbeat."""

    rank: int
    node_rank: int
    host: str
    step: int
    age: float
    """Seconds since the heartbeat."""
    own_seconds: float | None
    """What the rank itself takes for a step before it waits for others."""
    waits_seconds: float | None
    """How much longer the slowest rank takes: so long this rank waits in each step."""
    process: Literal["", "stopped", "gone"]
    """What this machine knows of the rank's process, if it is not that it runs."""


class Ranks:
    """The ranks of the run in a directory, brought up to date by `look`."""

    def __init__(self, directory: Path) -> None:
        self.seen: list[RankSeen] = []
        """The ranks as of the last look, by number."""
        self.slowest: str | None = None
        """A line about the rank that the others wait for, where there is one."""
        self._directory = directory
        self._elsewhere: dict[int, tuple[float, float]] = {}
        """For each rank of another machine, the time in its newest heartbeat, and when that came (monotonic clock)."""

    def look(self, now: float) -> None:
        """Read the heartbeats; `now` is the time in Unix seconds."""
        beats, boot, host = read_heartbeats(self._directory), boot_id(), socket.gethostname()
        speeds = [(beat["rank"], beat["node_rank"], _speed(beat)) for beat in beats]
        self.slowest = slowest(speeds)
        own = {rank: speed.get("mean_seconds") for rank, _, speed in speeds}
        longest = max((seconds for seconds in own.values() if seconds is not None), default=0.0)
        self.seen = []
        for beat in beats:
            seconds, is_here = own[beat["rank"]], beat.get("boot") == boot
            # A container has other process numbers.
            process = state_of(beat["pid"]) if is_here and beat["host"] == host else "running"
            self.seen.append(
                RankSeen(
                    beat["rank"],
                    beat["node_rank"],
                    beat["host"],
                    beat["step"],
                    self._age(beat, is_here, now),
                    seconds,
                    None if seconds is None else longest - seconds,
                    "" if process == "running" else "stopped" if process == "stopped" else "gone",
                )
            )

    def numbers(self, process: Literal["stopped", "gone"]) -> str:
        """The ranks whose process is stopped or gone, as "1, 3"; empty where there is none."""
        return ", ".join(str(rank.rank) for rank in self.seen if rank.process == process)

    def _age(self, beat: Beat, is_here: bool, now: float) -> float:
        """How many seconds old a heartbeat is.

        The clock of another machine is only asked where this is the first heartbeat seen of a rank.
        """
        here = time.monotonic()
        if is_here and (written := beat.get("monotonic")) is not None:
            return max(0.0, here - written)
        known = self._elsewhere.get(beat["rank"])
        if known is None or known[0] != beat["time"]:
            since = here - (max(0.0, now - beat["time"]) if known is None else 0.0)
            self._elsewhere[beat["rank"]] = known = (beat["time"], since)
        return here - known[1]


def _speed(beat: Beat) -> dict[str, float]:
    """The seconds per step that a heartbeat tells, empty where it does not tell them."""
    names = ("median_seconds", "mean_seconds", "p95_seconds")
    found = {name: value for name, value in beat.items() if name in names and isinstance(value, int | float)}
    return {name: float(value) for name, value in found.items()} if len(found) == len(names) else {}

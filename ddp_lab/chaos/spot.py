"""Ranks that come and go as on a market of spare machines: when which of them leave, and what that costs a run.

A rank of a single node leaves by SIGKILL. The launcher starts another process in its place at once; the drill stops
that one (SIGSTOP) before it has joined, and lets it go on when a rank is to come. So the launcher and the workers are
the product's own. Where each rank has a node of its own, the node is killed, and started again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

from ddp_lab.chaos.drill import SpotSpec
from ddp_lab.chaos.processes import BreakableProcesses
from ddp_lab.chaos.runner import Runner


@dataclass(frozen=True)
class Change:
    """Ranks that leave, or come, at the same time: by their places on the node, or by their nodes' numbers from 0."""

    at_seconds: float
    leaving: tuple[int, ...]
    coming: tuple[int, ...]
    ranks: int
    """How many there are afterwards."""


def changes(spot: SpotSpec, most: int, seed: int) -> list[Change]:
    """What the seed brings for at most `most` ranks, all of which are there at first."""
    dice, here, now, found = random.Random(seed), set(range(most)), 0.0, list[Change]()
    while (now := now + dice.uniform(*spot.every)) < spot.seconds:
        ranks = dice.choice([count for count in range(spot.least, most + 1) if count != len(here)])
        leaving = dice.sample(sorted(here), max(0, len(here) - ranks))
        coming = dice.sample(sorted(set(range(most)) - here), max(0, ranks - len(here)))
        here = here - set(leaving) | set(coming)
        found.append(Change(round(now, 3), tuple(leaving), tuple(coming), ranks))
    return found


def pauses(records: Sequence[dict[str, Any]]) -> list[float]:
    """Seconds that each change has cost, from records of metrics.jsonl: between two steps, less than a usual step's.

    A step that the new rank 0 has only told of, in the place of the one before, does not count as one.
    """
    steps: list[tuple[float, bool]] = []
    changed = False
    for record in records:
        if record["kind"] == "resume":
            changed = True
        elif record["kind"] == "step" and "data_wait" in record:
            steps.append((record["time"], changed))
            changed = False
    gaps = [(after - before, change) for (before, _), (after, change) in pairwise(steps)]
    usual = median([seconds for seconds, change in gaps if not change] or [0.0])
    return [max(0.0, seconds - usual) for seconds, change in gaps if change]


class SpotRunner(Runner):
    """Carries out a drill whose ranks come and go. A change waits until the run goes on after the one before."""

    def break_it(self) -> None:
        """Let ranks leave and come, and tell what it has cost."""
        spot, most = self.drill.spot, self.drill.most_at_once
        assert spot is not None
        self._until(self._is_whole, "the first step of all")
        began, done = time.time(), list[Change]()
        for change in changes(spot, most, self.report.seed):
            self._wait_for(began + change.at_seconds)
            self.say(f"{change.at_seconds:.1f} s, step {self.progress.step}: {change.ranks} ranks from now on")
            self._leave(change.leaving)
            self._come(change.coming)
            done.append(change)
            self._until(partial(self._goes_on, change.ranks), f"{change.ranks} ranks to go on")
        seconds = time.time() - began
        records = [record for record in self.progress.records if began <= record["time"] <= began + seconds]
        self._come(range(most))
        lost = pauses(records)
        self.report.spot = {
            "seconds": round(seconds, 1),
            "changes": len(done),
            "left": sum(len(change.leaving) for change in done),
            "came": sum(len(change.coming) for change in done),
            "pause_median": round(median(lost), 3) if lost else None,
            "pause_worst": round(max(lost), 3) if lost else None,
            "trained_share": (share := round(1 - sum(lost) / seconds, 4)),
        }
        if share < spot.share:
            words = f"{100 * share:.1f} % of the time was spent training, less than {100 * spot.share:g} %"
            self.report.remarks.append(words)

    def _leave(self, places: Collection[int]) -> None:
        if isinstance(self.cluster, BreakableProcesses) and self.drill.nodes == 1:
            self.cluster.leave(places)
            return
        self._held |= set(map(_node, places))
        for place in places:
            self.cluster.kill(_node(place))

    def _come(self, places: Collection[int]) -> None:
        if isinstance(self.cluster, BreakableProcesses) and self.drill.nodes == 1:
            self.cluster.come(places)
            return
        coming = self._held.intersection(map(_node, places))
        for name in sorted(coming):
            self.cluster.start_again(name)
        self._held -= coming

    def _wait_for(self, moment: float) -> None:
        self._until(lambda: time.time() >= moment, "the next change")

    def _goes_on(self, ranks: int) -> bool:
        """Whether the newest membership has so many ranks, and has made a step."""
        newest = ranks_now = None
        for record in self.progress.records:
            if record["kind"] == "resume":
                newest, ranks_now = record, record.get("ranks")
            elif record["kind"] == "step" and "data_wait" in record:
                newest = None
        return newest is None and ranks_now == ranks


def _node(place: int) -> str:
    return f"node-{place + 1}"

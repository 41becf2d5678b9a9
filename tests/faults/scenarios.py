"""The table of faults: what happens to ranks, nodes and the place where they meet, and what must follow.

Every place runs those that name it, in its own way to start nodes and to hurt them: processes, containers, SLURM,
ranks on GPUs and on their stand-in. `play` is what they share.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest

from ddp_core.observe.metrics import read_metrics
from tests.support.commands import trained, wait_until
from tests.support.processes import HANG

What = Literal[
    "kill",  # nodes with all that they have started
    "kill worker",
    "silence",  # nodes of which nothing more comes, though they live
    "restore",  # the silent ones
    "ask",  # nodes to leave, which the others outlive: they end with 75
    "stop",  # nodes to leave, so that all stop: with 75, and all is saved
    "start",  # one more node
    "lose rendezvous",
    "restore rendezvous",  # empty
    "cut rendezvous off",  # from the network
    "reconnect rendezvous",
    "train",  # ten steps
]
NEW_STEP, NEW_WORKER = "a step after a resume", "a worker that was not there"


class Event(NamedTuple):
    """What happens to the nodes (or workers) that have these ranks then; -1 is the newest node's.

    `then` is said next by one of the nodes that are left, or by `each` of them; or it is NEW_STEP or NEW_WORKER. In a
    live recovery, nobody else's process may have changed by then.
    """

    what: What
    ranks: tuple[int, ...] = ()
    then: str = ""
    each: bool = False


@dataclass(frozen=True)
class Scenario:
    """A training on `nodes` of `ranks` workers each, what happens to it, and what must follow.

    `kills` happen within a step, by the words of experiment_files/struck.py. `allowed` is --nnodes; `layouts` are those
    of the attempts, in a row; `says` is what each node says that is there from the beginning to the end,
    and `one_says` what one node says that is there in the end; `repeats`: whether steps may be done again. `row` is one
    of the fault matrix. `on` names the places that run it, each with the tier of its test.
    """

    name: str
    nodes: int = 1
    ranks: int = 1
    events: tuple[Event, ...] = ()
    kills: tuple[str, ...] = ()
    recovery: Literal["live", "restart"] = "live"
    words: tuple[str, ...] = ()
    allowed: str = ""
    layouts: str = ""
    says: tuple[str, ...] = ()
    one_says: tuple[str, ...] = ()
    repeats: bool = False
    row: int = 0
    on: Mapping[str, str] = field(default_factory=lambda: {"processes": "slow"})


def on_processes(name: str, nodes: int, *events: Event, tier: str = "slow", also: str = "", **more: Any) -> Scenario:
    """A scenario of real processes, and of the places in `also`."""
    return Scenario(name, nodes, events=events, on={"processes": tier} | dict.fromkeys(also.split(), "slow"), **more)


def kill(*ranks: int, then: str = "", each: bool = False) -> Event:
    return Event("kill", ranks, then, each)


def start(then: str = "") -> Event:
    return Event("start", then=then)


def restart(name: str, nodes: int, *events: Event, **more: Any) -> Scenario:
    allowed = f"1:{nodes}"
    return on_processes(name, nodes, *events, recovery="restart", allowed=allowed, repeats=True, **more)


def struck(name: str, *kills: str, **on: str) -> Scenario:
    return Scenario(
        name, ranks=3, kills=kills, on={place: "" if tier == "quick" else tier for place, tier in on.items()}
    )


TWO, THREE = "2 ranks go on", "3 ranks go on"
AWAY = Event("lose rendezvous", then="train on without it", each=True)
BACK = Event("restore rendezvous", then="the rendezvous is back", each=True)

LOST_NODES = (
    *(
        on_processes(
            f"the node of rank {rank} is lost",
            *(3, kill(rank, then=TWO)),
            layouts="3x1 2x1",
            says=(f"node {rank} (rank {rank}) is lost: its launcher has ended; the others go on",),
            tier="slow" if rank else "full",
        )
        for rank in (0, 2)
    ),
    *(
        on_processes(
            f"nothing comes from the node of rank {rank} for a while",
            *(3, Event("silence", (rank,), TWO), Event("restore", then=THREE)),
            words=("--timeout", "4"),
            one_says=(f"node {rank} (rank {rank}) is lost: nothing comes from it",),
            also="" if rank else "containers",
        )
        for rank in (0, 2)
    ),
    *(
        on_processes(
            f"the node of rank {rank} is asked to leave",
            *(3, Event("ask", (rank,), f"rank {rank} left after step")),
            layouts="3x1 2x1",
            says=(f"node {rank} (rank {rank}) has left, as it was asked to; the others go on",),
            tier="full" if rank else "slow",
        )
        for rank in (0, 1)
    ),
    on_processes("the nodes of ranks 0 and 1 are lost at once", 3, kill(0, 1, then="1 rank goes on")),
    on_processes("the node of rank 0 is lost, and another one comes", 2, kill(0), start(TWO)),
    on_processes(
        "the node of rank 0 is lost while another one comes", 2, start(NEW_WORKER), kill(0, then=TWO), allowed="2:3"
    ),
    on_processes(
        "a worker of one of two nodes is lost",
        *(2, Event("kill worker", (0,), "4 ranks go on")),
        ranks=2,
        # Where the nodes have unlike numbers of ranks, each rank counts as a node.
        layouts="2x2 3x1 2x2",
        tier="full",
    ),
    on_processes("a node comes", 2, start(THREE), allowed="2:3", layouts="2x1 3x1"),
    on_processes(
        "a node comes to a single one, which is lost then", 1, start(TWO), kill(0, then="1 rank goes on"), allowed="1:2"
    ),
    on_processes("nodes come while the first ones begin", 3, allowed="1:3", repeats=True),
    on_processes("no worker is left", 2, Event("kill worker", (0, 1)), repeats=True),
    on_processes("all nodes are asked to leave", 2, Event("stop", (0, 1)), start(), start(), repeats=True),
)
LOST_RENDEZVOUS = (
    on_processes(
        "the rendezvous is lost for a while",
        *(2, AWAY, Event("train"), BACK, start(THREE), kill(1, then=TWO)),
        allowed="2:3",
        tier="full",
        also="containers",
    ),
    on_processes("the rendezvous is lost for good", 2, AWAY),
    *(
        on_processes(
            f"a {whom} is lost without the rendezvous",
            2,
            *(AWAY, event, Event("restore rendezvous"), *then),
            ranks=2,
            words=("--timeout", "5"),
            repeats=True,
        )
        for whom, event, then in (
            ("node", kill(2, then="trying again", each=True), (start(),)),
            ("worker", Event("kill worker", (2,), "trying again", each=True), ()),
        )
    ),
    on_processes(
        "a node is asked to leave without the rendezvous",
        *(2, AWAY, Event("stop", (0,)), Event("restore rendezvous"), start(), start()),
        repeats=True,
    ),
)
WITH_RESTART = (
    *(
        restart(
            f"the node of rank {rank} is killed: the others train without it, and with another one",
            *(3, kill(rank, then=NEW_STEP), start(NEW_STEP)),
            # When the node came, the workers said why they stopped. This loss must not give that as its reason.
            Event("kill worker", (-1,), NEW_STEP),
            # Room for a node costs no restart.
            words=("--max-restarts", "2"),
            layouts="3x1 2x1 3x1",
            says=(f"lost rank {rank} (node {rank}), which is dead, at step", "another node has come; the workers save"),
            row=2,
        )
        for rank in (0, 2)
    ),
    restart(
        "a node that has the only copy of a part is killed, and another one comes",
        *(3, kill(1, then=NEW_STEP), start()),
        words=("--shard", "parameters"),
        layouts="3x1 2x1 3x1",
        row=2,
    ),
    *(
        restart(
            f"nothing comes from the node of rank 0 for a while (--shard {shard})",
            *(3, Event("silence", (0,), NEW_STEP), Event("restore")),
            words=("--shard", shard, "--timeout", "6"),
            one_says=said,
            row=5,
        )
        for shard, said in (
            ("none", ("rank 0 (node 0), which is stopped, at step", "this process may no longer write to")),
            ("parameters", ()),
        )
    ),
    restart(
        "the rendezvous is lost and waited for",
        *(2, Event("lose rendezvous", then="trying again", each=True), Event("restore rendezvous", then=NEW_STEP)),
        says=("the rendezvous at 127.0.0.1:",),
        row=3,
    ),
    restart(
        "workers of two nodes are killed one after another",
        2,
        *(Event("kill worker", (rank,), NEW_STEP) for rank in (1, 0, 1, 1, 0)),
        words=("--max-restarts", "10"),
        row=1,
    ),
    restart(
        "a node is asked to leave, all stop, and the launch goes on with the same id",
        *(2, Event("stop", (1,)), start(), start()),
        row=28,
    ),
)
# A new worker counts its passes anew.
WITHIN_A_STEP = (
    struck("in the update", "1.0 update 10", processes="quick", gpu="quick"),
    struck("in the update of rank 0", "0.0 update 10", stand_in="slow"),
    struck("rank 0 before it tells of an epoch", "0.0 updated 16", processes="full", gpu="quick"),
    struck("before the exchange", "1.0 forward 20", processes="slow", gpu="quick"),
    struck("in backward", "1.0 backward 22", processes="slow", gpu="quick", stand_in_rubbish="slow"),
    struck("at any moment", "1.0 later 31", processes="slow", gpu="quick", stand_in="slow"),
    struck("in an evaluation", "1.0 evaluation 5", processes="slow", gpu="quick", stand_in="slow"),
    struck("in a save", "0.0 save 3", processes="slow", gpu="quick", stand_in="slow"),
    struck("two at once", "1.0 update 10", "2.0 update 10", processes="slow"),
    struck("one after another", "0.0 update 10", "1.0 update 14", "2.0 forward 20", processes="slow"),
    struck("in a join", "1.0 update 10", "1.1 forward 1", processes="slow", gpu="quick"),
    # When these ranks die, their peers have received all that goes over gloo: only NCCL could tell of the loss.
    struck("in an exchange", "1.0 exchange 11", gpu="quick"),
    struck("in an exchange of rank 0", "0.0 exchange 11", gpu="quick", stand_in="slow", stand_in_rubbish="slow"),
    struck("in an update and an exchange", "2.0 update 5", "1.0 exchange 8", stand_in_rubbish="slow"),
    # First nothing but the launcher's word wakes them; at the second loss NCCL's kernels end, as if all were well.
    struck("in two exchanges", "2.0 exchange 5", "1.0 exchange 8", stand_in_turns="slow"),
)
ELSEWHERE = (
    Scenario(
        "a node is lost, and another comes later", 3, events=(kill(1, then=TWO), start(THREE)), on={"slurm": "slow"}
    ),
    Scenario(
        "the rendezvous has no network for a while",
        nodes=2,
        events=(
            *(AWAY._replace(what="cut rendezvous off"), Event("train"), BACK._replace(what="reconnect rendezvous")),
            Event("ask", (1,), "left after step"),
        ),
        on={"containers": "slow"},
    ),
    Scenario(
        "a node is asked to leave, and comes again",
        nodes=3,
        events=(Event("ask", (1,), "left after step"), start(THREE)),
        on={"slurm": "slow"},
    ),
)
SCENARIOS = (*LOST_NODES, *LOST_RENDEZVOUS, *WITH_RESTART, *WITHIN_A_STEP, *ELSEWHERE)


def on(place: str) -> list[Any]:
    """The scenarios that this place runs, as parameters of a test."""
    found = [each for each in SCENARIOS if place in each.on]
    return [
        pytest.param(each, id=each.name, marks=[getattr(pytest.mark, tier)] if (tier := each.on[place]) else [])
        for each in found
    ]


class Place:
    """Nodes that train, and how a test hurts them."""

    output: Path

    def happen(self, event: Event) -> set[Any]:
        """Let it happen; the workers that are gone with it."""
        raise NotImplementedError

    def workers(self) -> set[Any]:
        """The workers of the nodes that are here, where the place can tell who they are."""
        return set()

    def said(self) -> dict[Any, str]:
        """What each node has said that is here."""
        raise NotImplementedError

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until this is so."""
        try:
            wait_until(lambda: bool(condition()), HANG, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.said()}") from None

    def step(self) -> int:
        """The last step that the run has recorded."""
        found = [each["step"] for file in self.output.glob("*/*/metrics.jsonl") for each in read_metrics(file, "step")]
        return max(found, default=0)

    def nnodes(self) -> int:
        """On how many nodes the run trains, by its record."""
        return int(trained(self.output)[1]["attempts"][-1]["layout"]["nnodes"])

    def new_step(self, since: float) -> float:
        """Wait for a resume after this moment and then a step; the seconds until then."""
        raise NotImplementedError


class Times(NamedTuple):
    """How long after an event one of the others said something, and trained again."""

    noticed: float
    again: float


def play(scenario: Scenario, place: Place) -> list[Times]:
    """Let everything happen once all nodes train, and what must follow; the times of each event."""
    place.until(lambda: place.step() >= 10 and place.nnodes() == scenario.nodes, "all nodes train")
    return [_let_happen(event, place, is_live=not scenario.repeats) for event in scenario.events]


def _let_happen(event: Event, place: Place, is_live: bool) -> Times:
    before, heard, struck, noticed = place.workers(), place.said(), time.time(), 0.0

    def say(words: str) -> list[bool]:
        return [said.count(words) > heard.get(name, "").count(words) for name, said in place.said().items()]

    gone = place.happen(event)
    if event.then == NEW_STEP:
        if event.what in ("kill", "silence"):
            place.until(lambda: all(say("ddp: ")), "each notices the loss")
            noticed = time.time() - struck
        return Times(noticed, place.new_step(struck))
    if event.then == NEW_WORKER:
        place.until(lambda: place.workers() - before, event.then)
    elif event.then:
        place.until(lambda: all(say(event.then)) if event.each else any(say(event.then)), event.then)
        noticed = time.time() - struck
        if is_live:
            assert before - gone <= place.workers(), "a process that was not hurt has changed"
    return Times(noticed if event.each else 0.0, 0.0)


def check(scenario: Scenario, output: Path, digest: str, said: Sequence[str], always: Sequence[str]) -> None:
    """Check what must follow, of what is recorded and of what nodes have `said`, those that were `always` there too."""
    directory, record = trained(output)
    assert (record["status"], record["exit_code"], record["weights_sha256"]) == ("completed", 0, digest)
    layouts = [f"{each['layout']['nnodes']}x{each['layout']['nproc_per_node']}" for each in record["attempts"]]
    if scenario.repeats:
        # Where all start again, they may do so more than once on the same nodes.
        assert scenario.layouts in " ".join(layout for layout, _ in groupby(layouts)), layouts
    elif scenario.layouts:
        assert " ".join(layouts) == scenario.layouts
    for words in scenario.says:
        assert always, "a scenario that leaves nobody"
        assert all(words in each for each in always), words
    for words in scenario.one_says:
        assert any(words in each for each in said), words
    assert not any("Traceback" in each for each in said)
    if not scenario.repeats:
        assert not any("start again" in each or "resumed at step" in each for each in said)
        check_no_step_again(directory.metrics)


def check_no_step_again(metrics: Path) -> None:
    """Check that no step was done twice, but for one whose state has died with rank 0."""
    steps = [each["step"] for each in read_metrics(metrics, "step")]
    assert len(steps) == len(set(steps))
    newest = 0
    for each in map(json.loads, metrics.read_text().splitlines()):
        if each["kind"] == "resume":
            assert each["step"] >= newest - 1, "more than that was done again"
        newest = each["step"] if each["kind"] == "step" else newest

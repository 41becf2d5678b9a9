"""Nodes in containers that a test breaks by itself, or lets a drill break."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddp_core.observe.heartbeat import read_heartbeats
from ddp_lab.chaos.containers import BreakableContainers
from ddp_lab.chaos.drill import RENDEZVOUS, Drill
from ddp_lab.chaos.watch import Progress, Words
from ddp_lab.cluster.cluster import Spec
from ddp_lab.cluster.verdict import NodeResult, Verdict, judge
from tests.faults.launches import RANK
from tests.faults.scenarios import Event, Place
from tests.support.commands import ran

QUIET: dict[str, object] = {"faults": [], "timeout": 6, "checkpoint_every": 10, "paced": False}


def run_drill(place: Path, text: str) -> tuple[dict[str, Any], str]:
    """Run a drill from its YAML `text`; return its report and its output."""
    file = place / "quick.yaml"
    file.write_text(text)
    words = ["--drill", str(file), "--backend", "docker", "--seed", "1", "--verbose"]
    places = ["--output", str(place / "outputs"), "--data-dir", str(place / "data")]
    done = ran(sys.executable, "-m", "ddp_lab.chaos", *words, *places, timeout=400)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    (report,) = (place / "outputs").glob("*/*/drill.json")
    return json.loads(report.read_text()), done.stdout


class Nodes:
    """A cluster without a drill's script: the test itself breaks the nodes."""

    def __init__(self, place: Path, drill: Drill, *options: str, epochs: int = 6) -> None:
        self.cluster = BreakableContainers(drill)
        words = (*drill.train_options(), "--set", f"epochs={epochs}", *options)
        self.spec = Spec("digits", "ddp", drill.nodes, 1, words, place / "outputs", place / "data")
        self.progress = Progress(self.spec.output, self.spec.launch_id)
        self.words = Words()
        self.cluster.start(self.spec)
        self.cluster.follow(self.words.hear)

    def until(self, condition: Callable[[], object], seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while True:
            self.progress.look()
            if condition():
                return
            assert time.monotonic() < deadline, "\n".join(said.line for said in self.words.since(0))[-5000:]
            time.sleep(0.1)

    def at_step(self, step: int) -> None:
        self.until(lambda: self.progress.step >= step)

    def ended(self) -> bool:
        return set(self.cluster.exit_codes()) == set(self.cluster.nodes())

    def verdict(self) -> Verdict:
        self.until(self.ended)
        results: dict[str, NodeResult] = self.cluster.results()
        return judge(list(results.values()))

    def said(self) -> str:
        return "\n".join(f"{said.node} | {said.line}" for said in self.words.since(0))

    def of_rank(self, rank: int = 0) -> str:
        """The name of the node that holds this rank."""

        def found() -> list[str]:
            beats = read_heartbeats(self.progress.path) if self.progress.path is not None else []
            places = [(str(beat["host"]), int(beat["pid"])) for beat in beats if beat["rank"] == rank]
            return [name for name in self.cluster.nodes() if any(self.cluster.holds(name, *place) for place in places)]

        self.until(found)
        (name,) = found()
        return name

    def workers(self, name: str) -> set[int]:
        """The process ids of a node's workers, as this machine counts them."""
        rows = self.cluster.container(name).top(ps_args="-eo pid,comm")["Processes"]
        return {int(pid) for pid, comm in rows if comm.startswith(RANK)}


class Containers(Place):
    """The place of scenarios where a node is a container."""

    def __init__(self, nodes: Nodes) -> None:
        self.output, self._nodes, self._cluster = nodes.spec.output, nodes, nodes.cluster
        self.here = nodes.cluster.nodes()
        self._always, self._silent = set(self.here), list[str]()

    def happen(self, event: Event) -> set[int]:
        """Let it happen; the workers that are gone with it."""
        whom, cluster = [self._nodes.of_rank(rank) for rank in event.ranks], self._cluster
        gone = {pid for name in whom for pid in self._nodes.workers(name)}
        match event.what:
            case "kill":
                for name in whom:
                    cluster.kill(name)
            case "silence":
                self._silent = whom
                for name in whom:
                    cluster.cut_off(name)
            case "restore":
                for name in self._silent:
                    cluster.reconnect(name)
                self.here += self._silent
            case "ask":
                for name in whom:
                    cluster.stop_one(name)
                    assert cluster.exit_codes()[name] == 75
            case "start":
                cluster.scale(len(cluster.nodes()) + 1)
                self.here += set(cluster.nodes()) - set(self.here)
            case "lose rendezvous":
                cluster.kill(RENDEZVOUS)
            case "restore rendezvous":
                cluster.start_again(RENDEZVOUS)
            case "cut rendezvous off":
                cluster.cut_off(RENDEZVOUS)
            case "reconnect rendezvous":
                cluster.reconnect(RENDEZVOUS)
            case "train":
                self._nodes.at_step(self.step() + 20)
            case _:
                raise NotImplementedError(event.what)
        self.here = [name for name in self.here if name not in whom]
        if event.what != "silence":
            self._always -= set(whom)
        return gone

    def workers(self) -> set[int]:
        return {pid for name in self.here for pid in self._nodes.workers(name)}

    def said(self) -> dict[str, str]:
        words = self._nodes.words.since(0)
        return {name: "\n".join(said.line for said in words if said.node == name) for name in self.here}

    def until(self, condition: Callable[[], object], what: str) -> None:
        self._nodes.until(condition)

    def step(self) -> int:
        return self._nodes.progress.step

    def nnodes(self) -> int:
        return self._nodes.progress.nnodes

    def end(self) -> tuple[list[str], list[str]]:
        """Wait until all that are here have ended with 0; what they have said, and those that were always here."""
        self._nodes.until(lambda: set(self.here) <= self._cluster.exit_codes().keys(), 300)
        codes = self._cluster.exit_codes()
        assert {codes[name] for name in self.here} == {0}, self._nodes.said()[-5000:]
        said = self.said()
        return list(said.values()), [text for name, text in said.items() if name in self._always]


Start = Callable[..., Nodes]

"""Nodes in containers that a test breaks by itself, or lets a drill break."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddp_lab.chaos.containers import BreakableContainers
from ddp_lab.chaos.drill import Drill
from ddp_lab.chaos.watch import Progress, Words
from ddp_lab.cluster.cluster import Spec
from ddp_lab.cluster.verdict import NodeResult, Verdict, judge
from tests.faults.launches import RANK
from tests.support.commands import ROOT

QUIET: dict[str, object] = {"faults": [], "timeout": 6, "checkpoint_every": 10, "paced": False}


def run_drill(place: Path, text: str) -> tuple[dict[str, Any], str]:
    """Run a drill from its YAML `text`; return its report and its output."""
    file = place / "quick.yaml"
    file.write_text(text)
    words = ["--drill", str(file), "--backend", "docker", "--seed", "1", "--verbose"]
    places = ["--output", str(place / "outputs"), "--data-dir", str(place / "data")]
    done = subprocess.run(
        [sys.executable, "-m", "ddp_lab.chaos", *words, *places],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
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

    def of_rank_0(self) -> str:
        """The name of the node that holds rank 0."""
        self.until(self.progress.first_rank_host)
        found = self.progress.first_rank_host()
        assert found is not None
        (name,) = [name for name in self.cluster.nodes() if self.cluster.holds(name, *found)]
        return name

    def workers(self, name: str) -> set[int]:
        """The process ids of a node's workers, as this machine counts them."""
        rows = self.cluster.container(name).top(ps_args="-eo pid,comm")["Processes"]
        return {int(pid) for pid, comm in rows if comm.startswith(RANK)}


Start = Callable[..., Nodes]

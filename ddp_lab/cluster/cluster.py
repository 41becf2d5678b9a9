"""What a cluster is asked to be, and the wait for its end, whatever its nodes are made of."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from ddp_lab.cluster.verdict import NodeResult

Write = Callable[[str, str], None]
"""Called with a node's name and one line of its output, from any thread."""


@dataclass(frozen=True)
class Spec:
    """What to start: an experiment on `nnodes` x `nproc_per_node` processes, or (`single`) the baseline beside it."""

    experiment: str
    layout: Literal["single", "ddp"] = "ddp"
    nnodes: int = 1
    nproc_per_node: int = 1
    options: tuple[str, ...] = ()
    """Further options of `ddp train`."""
    output: Path = Path("outputs")
    data: Path = Path("data")
    launch_id: str = field(default_factory=lambda: secrets.token_hex(6))
    """New for each launch, so that late members of an earlier launch do not join it; the run's record holds it."""


class Backend(Protocol):
    """Where nodes live. `start` may be called once; `stop` any number of times, also after a failed start."""

    name: str

    def start(self, spec: Spec) -> None:
        """Start every node and, for the layout `ddp`, their rendezvous. Raises UserError."""

    def nodes(self) -> list[str]:
        """The names of all nodes that were started."""

    def follow(self, write: Write) -> None:
        """Hand every line of every node to `write` from threads of its own; return at once."""

    def results(self) -> dict[str, NodeResult]:
        """The nodes that have ended."""

    def terminate(self) -> None:
        """Send SIGTERM to every node, which then saves and leaves."""

    def stop(self) -> None:
        """End whatever is still there, and leave nothing behind."""


def wait_for(
    backend: Backend, *, patience: float = 120, deadline: float | None = None, poll: float = 0.2
) -> list[NodeResult]:
    """Wait for every node; returns how each ended.

    Once a node has failed the others get `patience` seconds to notice; `deadline` seconds bound the whole. Then
    SIGTERM goes to all, and what does not obey within another `patience` seconds is killed.
    """
    started, failed_at, asked_at = time.monotonic(), None, None
    while True:
        results, now = backend.results(), time.monotonic()
        if len(results) == len(backend.nodes()):
            return [results[name] for name in backend.nodes()]
        if failed_at is None and any(result.exit_code != 0 for result in results.values()):
            failed_at = now
        overdue = (failed_at is not None and now - failed_at > patience) or (
            deadline is not None and now - started > deadline
        )
        if asked_at is None and overdue:
            asked_at = now
            backend.terminate()
        elif asked_at is not None and now - asked_at > patience:
            backend.stop()
            return [results.get(name, NodeResult(name, 137)) for name in backend.nodes()]
        time.sleep(poll)

"""What each fault does to a cluster and what ends it: one pair of actions per kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ddp_lab.chaos.drill import EVERYTHING, RENDEZVOUS, Planned
from ddp_lab.cluster.cluster import Backend

BeginAndEnd = tuple[Callable[[], None], Callable[[], None]]


class Breakable(Backend, Protocol):
    """A backend whose nodes, and rendezvous, can be broken and mended."""

    kinds: frozenset[str]
    """The faults that can be made here."""

    def is_running(self, name: str) -> bool: ...
    def exit_codes(self) -> dict[str, int]: ...
    def holds(self, name: str, host: str, pid: int) -> bool: ...
    def start_again(self, name: str) -> None: ...
    def kill(self, name: str) -> float: ...
    def stop_one(self, name: str) -> None: ...
    def begin_and_end(self, fault: Planned, node: str) -> BeginAndEnd: ...
    def settle(self) -> None: ...
    def left_behind(self) -> list[str]: ...


@dataclass(frozen=True)
class Action:
    """One fault on one node: how it begins and how it ends."""

    name: str
    begin: Callable[[], float | None]
    """Returns when the fault struck, or None where the moment of the call is the best that is known."""
    end: Callable[[], None]
    duration: float
    holds_back: frozenset[str] = frozenset()
    """Nodes that are not started again before the fault is over."""
    harmless: bool = False
    """Whether the run must go on as if nothing had happened."""
    repeats: bool = True
    """Whether steps may be done again. Where not, one may be, whose state has died with rank 0."""


def action(fault: Planned, node: str, cluster: Breakable, is_live: bool = False) -> Action:
    """The action for a fault on `node` (a node's name, or the whole cluster); `is_live`: with live recovery.

    The runner starts everything again that has ended, once the action no longer holds it back.
    """
    victims = frozenset([node]) if node != EVERYTHING else frozenset([*cluster.nodes(), RENDEZVOUS])
    kind, name = fault.kind, f"{fault.kind} {node}"

    def nothing() -> None:
        """A dead node is started again by the runner."""

    def renew() -> None:
        """End the rendezvous too: a launch that has ended has closed it for good. The runner starts a fresh one."""
        cluster.kill(RENDEZVOUS)

    if kind == "kill":
        goes_on = is_live and node == RENDEZVOUS
        return Action(name, lambda: cluster.kill(node), nothing, fault.duration, victims, goes_on, not is_live)
    if kind == "stop" and is_live:
        return Action(name, lambda: cluster.stop_one(node), nothing, fault.duration, victims, repeats=False)
    if kind == "stop":
        return Action(name, lambda: cluster.stop_one(node), renew, fault.duration, frozenset(cluster.nodes()))
    begin, end = cluster.begin_and_end(fault, node)

    def free_and_renew() -> None:
        end()
        renew()

    held = victims if kind in ("partition", "disk-full", "down") else frozenset()
    repeats = not is_live or kind not in ("pause", "partition", "oom")
    mend = free_and_renew if kind == "disk-full" else end
    return Action(name, begin, mend, fault.duration, held, kind in ("slow", "throttle"), repeats)

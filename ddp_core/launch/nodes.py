"""Where the nodes of a launch are to meet, and the errors with which one of them leaves the others.

This loads nothing of torch's launcher: a worker is forked before that is loaded, and has no use for it.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from ddp_core.base.errors import ExitCode, UserError, first_line


@dataclass(frozen=True)
class Meeting:
    """Where the nodes of a launch meet, and how many there may be."""

    min_nodes: int = 1
    max_nodes: int = 1
    endpoint: str | None = None
    """HOST:PORT of the rendezvous; None where this machine is the only node."""
    launch_id: str | None = None
    """What tells this launch from others at the same endpoint; None until the launch has begun."""
    is_host: bool = False
    """Whether the nodes meet at this process, at the endpoint's port."""


class RendezvousLost(UserError):
    """The store that the nodes meet at is gone; another launch may find it again."""

    def __init__(self, endpoint: str | None, error: BaseException) -> None:
        reason = first_line(error)
        super().__init__(f"the rendezvous at {endpoint} is lost ({reason})", ExitCode.PEERS_LOST)


class HandedOver(UserError):
    """This node has left the others, as it was asked to, and they go on."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"this node has left the others, who go on ({number.name})", ExitCode.STOPPED)


class EndedElsewhere(UserError):
    """Another node has ended the launch, in whatever way."""

    def __init__(self) -> None:
        super().__init__("another node has ended this launch; its own message says why", ExitCode.PEERS_LOST)

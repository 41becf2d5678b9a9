"""How a launcher looks after the workers of its node; what it needs for that is loaded after the nursery was forked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ddp_core.base.torch_internals import end_keep_alives
from ddp_core.launch.nodes import Meeting

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from ddp_core.launch.agent import Agent

_CUT_OFF_SECONDS = 20.0
_ENDING_SECONDS = 2.0


class Supervision:
    """Where a worker or a node is lost, all start again; a live recovery (`ddp_core.live`) does more than this."""

    looking = 0.1
    """Seconds between two looks at the workers."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        """Seconds after which a silent process counts as lost."""

    def handler(
        self, meeting: Meeting, address: str, facts: Mapping[str, str], nproc_per_node: int, join_seconds: int
    ) -> RendezvousHandler:
        """Where this node meets the others."""
        from ddp_core.launch.meeting import join

        return join(meeting, address, join_seconds)

    def agent(self, *of_agent: Any) -> Agent:
        """What starts the workers and looks at them."""
        from ddp_core.launch.agent import Agent

        return Agent(*of_agent)

    @contextmanager
    def watched(self, agent: Agent, handler: RendezvousHandler, meeting: Meeting) -> Iterator[None]:
        """A block in which the agent runs; it ends this process where the node is cut off from the others."""
        from ddp_core.launch.meeting import leaves_when_cut_off

        patience = max(2 * self.patience, _CUT_OFF_SECONDS)
        try:
            with leaves_when_cut_off(meeting.endpoint, patience, agent.kill_workers):
                yield
        finally:
            # A thread that waits for the store's answer while the interpreter ends aborts the process, and its exit
            # code is lost. The rendezvous itself stays open for other nodes.
            end_keep_alives(handler, _ENDING_SECONDS)

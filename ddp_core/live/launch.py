"""A launch whose workers go on where one of them is lost."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ddp_core.base.ending import said_by
from ddp_core.base.torch_internals import ALIKE_NODES
from ddp_core.experiment.request import Request
from ddp_core.launch.launch import launch
from ddp_core.launch.nodes import Meeting
from ddp_core.launch.supervision import Supervision
from ddp_core.live.recovery import LiveRecovery
from ddp_core.run.run import work

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from ddp_core.launch.agent import Agent


def launch_live(request: Request, meeting: Meeting) -> int:
    """Run the request in workers of this node that outlive lost ones; returns the exit code. Raises as `launch`."""
    return launch(request, meeting, worker_main, LiveSupervision(request.options.timeout))


@said_by("ddp")
def worker_main(words: Sequence[str]) -> int:
    """Carry out the request of a launcher as one of its workers; returns the exit code. See `work`."""
    return work(words, LiveRecovery)


class LiveSupervision(Supervision):
    """Where a worker or a node is lost, the other ones go on, and new ones join them."""

    looking = 0.001  # each look waits for news itself

    def handler(
        self, meeting: Meeting, address: str, facts: Mapping[str, str], nproc_per_node: int, join_seconds: int
    ) -> RendezvousHandler:
        from ddp_core.launch.meeting import reach
        from ddp_core.live.meeting import LiveRendezvous

        os.environ[ALIKE_NODES] = "1"
        return LiveRendezvous(reach(meeting), meeting, address, facts, nproc_per_node, join_seconds)

    def agent(self, *of_agent: Any) -> Agent:
        from ddp_core.live.agent import LiveAgent

        return LiveAgent(self.patience, *of_agent)

    @contextmanager
    def watched(self, agent: Agent, handler: RendezvousHandler, meeting: Meeting) -> Iterator[None]:
        """A block in which the agent runs, which notices by itself where the store is lost."""
        yield

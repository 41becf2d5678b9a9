"""What a worker does where another one is lost: it ends, and the launcher starts all of them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.stop import StopRequest
from ddp_core.distributed.world import World
from ddp_core.experiment.building import BuiltExperiment
from ddp_core.experiment.request import Request
from ddp_core.observe.callback import Callback
from ddp_core.record.directory import RunDirectory
from ddp_core.run.beginning import Prepared
from ddp_core.trainers import Trainer


class Recovery:
    """The steps of a training in which a live recovery (`ddp_core.live`) does more than this."""

    stop_file: str | None = None
    """A file that says whether all are asked to stop; None where a signal alone does."""
    collectives: Callable[[World, torch.device], Collectives] = Collectives
    """What makes the collectives of a group."""

    def __init__(self, request: Request, world: World) -> None:
        self.prepared = Prepared()

    @staticmethod
    def first_request(request: Request, world: World) -> Request:
        """The request for the nodes that have come. Raises UserError (6) where others were asked for."""
        return request.for_nodes(world.nnodes)

    def groups(self, request: Request, world: World, stop: StopRequest) -> Iterator[tuple[Request, World]]:
        """The groups in which this process trains, one after the other, with the request for each."""
        yield request, world

    def surviving(self) -> AbstractContextManager[None]:
        """A block for one group, which ends without an error where the next group is to be met."""
        return nullcontext()

    def leaving(self) -> AbstractContextManager[None]:
        """A block in which errors are looked at before anything takes them for the end of the run."""
        return nullcontext()

    def require_told_once(self, parts: BuiltExperiment) -> None:
        """Raises UserError (2) where this experiment cannot be recovered so."""

    def holds_newest(self, collectives: Collectives, directory: RunDirectory) -> bool:
        """Give every rank the newest state that one of them holds; False where a checkpoint has a newer one."""
        return False

    def same(self, callbacks: Sequence[Callback]) -> Sequence[Callback]:
        """The callbacks to go on with."""
        return callbacks

    def await_built(self, collectives: Collectives) -> None:
        """Called when the trainer is built."""

    def hold(self, trainer: Trainer) -> None:
        """Called when the trainer is closed."""

    def go_on(self, trainer: Trainer) -> None:
        """Let the trainer go on from the state that was held."""

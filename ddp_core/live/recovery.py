"""A live recovery, as a worker does it: it survives the loss of another one, and goes on from the newest state.

Nothing of the lost group is used again: model, trainer and process group are built anew, as at the start of a worker,
in the process that there is. What stays is the state that it held when it left (`HeldState`).
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.checkpoint import Superseded, find_checkpoints, newest_valid
from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.stop import Regroup, StopRequest
from ddp_core.distributed.world import World
from ddp_core.experiment.building import BuiltExperiment
from ddp_core.experiment.request import Request
from ddp_core.live.collectives import LiveCollectives
from ddp_core.live.held import HeldState
from ddp_core.live.member import Member, stop_file
from ddp_core.live.membership import goes_back_to_checkpoint, newest_holder, node_of
from ddp_core.observe.callback import Callback
from ddp_core.observe.lost_peers import is_peer_loss
from ddp_core.record.directory import RunDirectory
from ddp_core.run.recovery import Recovery
from ddp_core.run.starting import by_rank_0
from ddp_core.trainers import Trainer


class LiveRecovery(Recovery):
    """What one worker keeps from one group to the next.

    `world`: what the launcher has given.
    """

    def __init__(self, request: Request, world: World) -> None:
        super().__init__(request, world)
        self._member = Member(world, request.options.timeout)
        self.stop_file = None if world.report_dir is None else stop_file(world.report_dir)
        self.collectives = lambda place, device: LiveCollectives(place, device, self._member)
        self._held: HeldState | None = None
        self._callbacks: Sequence[Callback] | None = None
        self._trained_with: tuple[str, ...] = ()
        """The members with which this process has trained last."""
        self._is_leaving, self._left_at = False, time.monotonic()
        self._is_built = False

    @staticmethod
    def first_request(request: Request, world: World) -> Request:
        """This request: each group has its own number of nodes."""
        return request

    def groups(self, request: Request, world: World, stop: StopRequest) -> Iterator[tuple[Request, World]]:
        """The groups that take this process in; the last one is over when nobody does any more. See `Member.take`."""
        if self._member.comes_late:
            self.prepared.prepare(request)
        while True:
            self._is_built = False
            if (place := self._member.take(lambda: stop.requested)) is None:
                return
            yield request.for_ranks(place.nnodes, place.nproc_per_node), place

    def await_built(self, collectives: Collectives) -> None:
        """Wait until all ranks have sent what building a trainer sends: from then on its weights are a state to hold.

        DDP sends the first weights of rank 0 to all, and NCCL may have left this undone when DDP is built.
        """
        if collectives.device.type == "cuda":
            built = torch.cuda.Event()
            built.record()
            collectives.await_step(None, built)
        self._is_built = True

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """A block in which the loss of another rank becomes Regroup, before anything takes it for the end of the run.

        What the error refers to is let go: DDP must be gone before its group is.
        """
        try:
            yield
        except Exception as error:
            if not _is_survived(error):
                raise
            self._is_leaving, self._left_at = True, time.monotonic()
            _let_go(error)
        if self._is_leaving:
            raise Regroup

    @contextmanager
    def surviving(self) -> Iterator[None]:
        """A block that ends without an error where another rank is lost, or is to be let in."""
        try:
            yield
        except Exception as error:
            if not _is_survived(error):
                raise
            _let_go(error)
        self._is_leaving = False
        self._member.leave(-1 if self._held is None else self._held.at.step)
        # Frees the memory of the old model for the next one, while the launchers decide which processes train it.
        gc.collect()

    def require_told_once(self, parts: BuiltExperiment) -> None:
        """Raises UserError (2) where callbacks or a user's observers may have seen what a live recovery takes back."""
        of_all = next((type(each).__name__ for each in parts.callbacks if each.ranks == "all"), None)
        if of_all is not None:
            shown = f'callback {of_all} has ranks = "all"'
            why = f"{shown}, and may see a step on some ranks that is computed again on others"
        elif parts.observers:
            why = "this experiment has an observer of its own, which may see a part of a step that is computed again"
        else:
            return
        raise UserError(f"--recovery live cannot be had here: {why}; use --recovery restart")

    def hold(self, trainer: Trainer) -> None:
        """Keep the state of a trainer that was closed, where this rank leaves its group."""
        if self._is_leaving and self._is_built:
            self._held = HeldState.of(trainer)

    def holds_newest(self, collectives: Collectives, directory: RunDirectory) -> bool:
        """Give every rank the newest state that one of them holds; False where a checkpoint has a newer one.

        A rank that is behind keeps its own until it has received all of the other one.
        """
        mine = self._held
        offered: list[HeldState | None] = collectives.gather(None if mine is None else mine.offer)
        at = [None if each is None else each.at for each in offered]
        holder = newest_holder(at)
        newest = None if holder is None else at[holder]
        saved = by_rank_0(collectives, _saved_step, directory, -1 if newest is None else newest.step)
        if holder is None or newest is None or goes_back_to_checkpoint(newest, saved):
            self._held, self._trained_with = None, self._member.members
            return False
        if any(each is None or each.step < newest.step for each in at):
            received = collectives.broadcast(mine if collectives.world.rank == holder else None, source=holder)
            mine = mine if mine is not None and mine.at.step == newest.step else received
        assert mine is not None
        offers = [each for each in offered if each is not None]
        self._held = mine.at_position(next(each for each in offers if each.at == newest), saved or 0, offers)
        return True

    def same(self, callbacks: Sequence[Callback]) -> Sequence[Callback]:
        """The callbacks of the groups before, where this process goes on from a held state; else these new ones."""
        if self._held is None or self._callbacks is None:
            self._callbacks = callbacks
        return self._callbacks

    def go_on(self, trainer: Trainer) -> None:
        """Let the trainer go on from the newest state, and say so (rank 0)."""
        held, self._held = self._held, None  # these weights are given up as soon as the trainer has copied them
        assert held is not None
        held.give_to(trainer)
        job, step = trainer.job, held.at.step
        change = Change.between(self._trained_with, self._member.members, self._member.leaving)
        self._trained_with = self._member.members
        pause = time.monotonic() - self._left_at
        newest = job.metrics.go_on(
            step,
            membership=self._member.number,
            ranks=len(self._member.members),
            lost=sorted([*change.lost, *change.left]),
            joined=change.joined,
            pause=round(pause, 3),
        )
        trainer.figures.go_on(step)
        again = "no step repeated" if newest <= step else f"step {newest} is computed again, since its state is lost"
        job.console.say(f"membership {self._member.number}: {change.in_words(step)} after {pause:.1f} s, {again}")


@dataclass(frozen=True)
class Change:
    """What a membership has changed."""

    lost: list[int]
    """The ranks that were lost, as they were in the group before."""
    left: list[int]
    """The ranks whose node was asked to leave, as they were in the group before."""
    joined: list[int]
    """The ranks of new processes."""
    ranks: int
    """How many there are now."""

    @classmethod
    def between(cls, before: Sequence[str], now: Sequence[str], leaving: Collection[int] = ()) -> Self:
        """The change from the members of one group to those of the next, each in the order of their ranks.

        `leaving`: the nodes that were asked to leave.
        """
        gone = [rank for rank, name in enumerate(before) if name not in now]
        left = [rank for rank in gone if node_of(before[rank]) in leaving]
        joined = [rank for rank, name in enumerate(now) if name not in before]
        return cls([rank for rank in gone if rank not in left], left, joined, len(now))

    def in_words(self, step: int) -> str:
        """As people are told it; `step` is the last one that was done."""
        parts = [f"{_ranks(self.lost)} lost"] if self.lost else []
        parts += [f"{_ranks(self.left)} left"] if self.left else []
        parts += [f"{_ranks(self.joined)} joined"] if self.joined else []
        who = "1 rank goes on" if self.ranks == 1 else f"{self.ranks} ranks go on"
        return f"{' and '.join(parts) or 'met again'} after step {step}; {who}"


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _saved_step(directory: RunDirectory, newest: int) -> int | None:
    """The step of the newest checkpoint; one that is newer than `newest` is read, whether it is good."""
    found = next(iter(find_checkpoints(directory.checkpoints)), None)
    if found is not None and found.step > newest:
        found = newest_valid(directory.checkpoints)
    return None if found is None else found.step


def _is_survived(error: Exception) -> bool:
    """Whether only another rank has ended, or is silent, or is to be let in."""
    lost = isinstance(error, UserError) and error.exit_code == ExitCode.PEERS_LOST and not isinstance(error, Superseded)
    return isinstance(error, Regroup) or lost or is_peer_loss(error)


def _let_go(error: BaseException) -> None:
    """Forget the variables of the functions in which the error came up, and those before it."""
    before: BaseException | None = error
    while before is not None:
        traceback.clear_frames(before.__traceback__)
        before.__traceback__ = None
        before = before.__cause__ or before.__context__

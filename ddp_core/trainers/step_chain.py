"""Fills the chain of a run: what each step was made of, and a checksum of what it has made.

Every rank notes what it has: of its micro-batches the samples, of weights and optimizer state what no rank before it
has. The ranks' numbers add up to those of a run in one process, so the chain is the same on every layout. They are put
together now and then, and before each save, since a run that is resumed goes on after a save.

In a live recovery the process that writes may be lost with steps that the file does not have yet. So there every rank
notes all of the state, and keeps its notes until the next ones are put together; the samples of a lost rank are read
again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ddp_core.base.digests import named_tensors, optimizer_digest, weights_digest
from ddp_core.base.position_sums import position_sum
from ddp_core.checkpoint import CutTensor
from ddp_core.checkpoint.queues import without_queues
from ddp_core.checkpoint.state import leaves
from ddp_core.data.trees import Batch, tensors_of
from ddp_core.observe.chain import OTHER_STATE, ChainFile, ChainPlan
from ddp_core.observe.step import StepBatch, StepObserver, StepReport

if TYPE_CHECKING:
    from ddp_core.trainers.trainer import Trainer

_TOGETHER = 32
"""So many steps, or a few more, are put together at a time: with several ranks they take a message."""
_FIRST_FACTOR = 3
"""Of the optimizer's entries in a tensor's number, beside its own 1; all are odd, so that no change is lost."""


class Noted(NamedTuple):
    """A step that is not in the chain yet, as a rank knows it."""

    step: int
    """Counted from 0."""
    epoch: int
    rates: list[float]
    parts: Sequence[int]
    """The micro-batches whose samples the rank knows."""
    own: Tensor
    """The numbers of the samples of each micro-batch, then those of each tensor; 0 where the rank has nothing."""
    report: StepReport | None = None
    """The losses, once they are known."""


def merged(by_rank: Iterable[Sequence[Noted]], steps: int) -> list[Noted]:
    """What all ranks of a live recovery together know of each of the first `steps` steps, as far as they have notes."""
    found: dict[int, Noted] = {}
    for noted in itertools.chain.from_iterable(by_rank):
        known = found.setdefault(noted.step, noted)
        more = [part for part in noted.parts if part not in known.parts]
        own = known.own.clone()
        for part in more:
            own[part] = noted.own[part]
        found[noted.step] = known._replace(parts=[*known.parts, *more], own=own, report=known.report or noted.report)
    return [found[step] for step in sorted(found) if step < steps]


class StepChain(StepObserver):
    """Keeps the chain of a trainer's run; all ranks call the same methods."""

    def __init__(self, trainer: Trainer, plan: ChainPlan) -> None:
        self._trainer, self.plan = trainer, plan
        self._collectives = trainer.job.collectives
        self._is_first = self._collectives.world.is_first
        self.file = ChainFile(plan) if self._is_first else None
        self._micro_batches = trainer.cut.micro_batches
        # Before anything is cut: a cut model has other parameters, of the same names.
        names = {id(each): name for name, each in trainer.model.named_parameters()}
        groups = trainer.state.optimizer.param_groups
        self._updated = [names.get(id(each)) for group in groups for each in group["params"]]
        """The names of the parameters, as the optimizer's state_dict numbers them."""
        self._places = {name: place for place, name in enumerate(trainer.model.state_dict())}
        self._contents: Tensor | None = None
        self._reports: dict[int, StepReport] = {}
        self._noted: list[Noted] = []
        self._is_live = trainer.job.makes_room is not None
        self._newest: Sequence[Noted] = ()
        """The steps that were put together last, in a live recovery: the file may not have them when rank 0 is lost."""
        self._kept = 0
        """The last step whose checkpoint the chain tells of; a step may be saved twice."""

    @property
    def tensors(self) -> list[str]:
        """The names of the numbers in `state`."""
        return [*self._places, OTHER_STATE]

    def start_digest(self) -> str | None:
        """SHA-256 of the weights as they are now, on rank 0, where the chain begins; before a checkpoint is loaded.

        A collective.
        """
        weights = self._trainer.state.ownership.whole_weights() if self.plan.is_new else None
        return weights_digest(weights) if self._is_first and weights is not None else None

    def notes(self) -> list[Noted]:
        """The steps that the file may not have when a rank of a live recovery is lost, as far as this rank knows."""
        own = [each._replace(own=each.own.cpu(), report=self._reports.get(each.step)) for each in self._noted]
        return [*self._newest, *own]

    def take_over(self, notes: Sequence[Noted]) -> None:
        """Take what the ranks of a live recovery together know; all of them, before `begin`."""
        self._newest = notes

    def begin(self, step: int, start_sha256: str | None) -> None:
        """Begin the chain, or take it up after `step` (rank 0). Raises OSError, and UserError as `ChainFile` does."""
        assert self.file is not None
        if not self.plan.is_new:
            self.file.go_on(
                step,
                lambda reached: [self._line(self._read_again(each)) for each in self._newest if each.step >= reached],
            )
            return
        facts = {
            "start_sha256": start_sha256,
            "from_step": step,
            "total_steps": self._trainer.total_steps,
            "keep": self.plan.keep,
            "every": self.plan.every,
            "micro_batches": self._micro_batches,
        }
        self.file.begin({**self.plan.facts, **facts}, self.tensors)

    def is_kept(self, step: int) -> bool:
        """Whether the checkpoint after so many steps is kept for an audit: one of the even places, or the last one."""
        return step % self.plan.every == 0 or self._trainer.is_at_end

    def before_step(self, batch: StepBatch) -> None:
        own = torch.zeros(self._micro_batches, dtype=torch.int64, device=self._trainer.device)
        for part, tensors in zip(batch.micro_batches, batch.tensors, strict=True):
            own[part.index] = _sum_of_batch(tensors)
        self._contents = own

    def gradients_done(self, batch: StepBatch, reports: Sequence[StepReport]) -> None:
        self._reports |= {report.step: report for report in reports}

    def after_step(self, batch: StepBatch) -> None:
        assert self._contents is not None
        rates = [float(group["lr"]) for group in self._trainer.state.optimizer.param_groups]
        own = torch.cat([self._contents, self._state()])
        parts = [part.index for part in batch.micro_batches]
        self._noted.append(Noted(batch.step, batch.epoch, rates, parts, own))
        if len(self._noted) >= _TOGETHER:
            self.put_together()

    def _state(self) -> Tensor:
        """The numbers of the tensors, of what this rank has."""
        found = list(self._sums())
        places = torch.tensor([place for place, _, _ in found], dtype=torch.int64)
        factors = torch.tensor([factor for _, factor, _ in found], dtype=torch.int64)
        device = self._trainer.device
        numbers = torch.zeros(len(self._places) + 1, dtype=torch.int64, device=device)
        if found:
            sums = torch.stack([each.to(device) for _, _, each in found])
            numbers.index_add_(0, places.to(device), sums * factors.to(device))
        return numbers

    def _sums(self) -> Iterator[tuple[int, int, Tensor]]:
        """The sum of each leaf of the state, the place of the number that it belongs to, and its factor there."""
        state, others = self._trainer.state, len(self._places)
        for name, value in state.ownership.own_weights().items():
            for each in self._own_sums(value):
                yield self._places[name], 1, each
        optimizer = state.ownership.own_state()
        for key, value in optimizer.get("state", optimizer).items():
            updated = self._updated[key] if isinstance(key, int) and key < len(self._updated) else None
            yield from self._sums_of_entries(self._places.get(updated or "", others), value)
        rest = {
            "scaler": None if state.scaler is None else state.scaler.state_dict(),
            "schedule": None if state.schedule is None else without_queues(state.schedule.state_dict()),
            "average": state.averages(in_parts=self._trainer.job.layout.saves_in_parts),
        }
        yield from self._sums_of_entries(others, rest)

    def _sums_of_entries(self, place: int, tree: Any) -> Iterator[tuple[int, int, Tensor]]:
        """The sums of the leaves of a tree, each with an odd factor of its own, the same on all ranks."""
        for number, (_, leaf) in enumerate(sorted(leaves(tree).items())):
            for each in self._own_sums(leaf):
                yield place, _FIRST_FACTOR + 2 * number, each

    def _own_sums(self, leaf: Any) -> Iterator[Tensor]:
        """The sums of what no rank before this one has of a leaf of the state; in a live recovery, of all of it."""
        if isinstance(leaf, CutTensor):
            for start, piece in leaf.pieces.items():
                yield position_sum(piece, start)
        elif self._is_first or self._is_live:
            for _, tensor in [("", leaf)] if isinstance(leaf, Tensor) else named_tensors({"": leaf}):
                yield position_sum(tensor)

    def evaluated(self, step: int, figures: Mapping[str, Any]) -> None:
        """Note the figures of an evaluation after `step`. A collective."""
        self.put_together()
        if self.file is not None and figures:
            self.file.append({"kind": "evaluation", "step": step, "figures": dict(figures)})

    def before_save(self, step: int) -> None:
        """Bring the chain up to `step`; where its checkpoint is kept, with the SHA-256 of the state. A collective."""
        self.put_together()
        if self.is_kept(step) and step > self._kept:
            self._kept, trainer = step, self._trainer
            state = trainer.state.state_dict(in_parts=trainer.job.layout.saves_in_parts)
            whole = trainer.state.ownership.whole_on_first(state)
            if self.file is not None and whole is not None:
                self.file.append({"kind": "kept", "step": step, **state_digests(whole)})

    def put_together(self) -> None:
        """Write the lines of the steps whose losses are known. A collective; all ranks know the same losses."""
        known = list(takewhile(lambda noted: noted.step in self._reports, self._noted))
        if not known:
            return
        own = torch.stack([noted.own for noted in known]).cpu().numpy()
        if self._is_live and not self._is_first:
            own[:, self._micro_batches :] = 0  # rank 0 has noted the same
        total = torch.from_numpy(sum(self._collectives.gather(own), start=np.zeros_like(own)))
        parts = range(self._micro_batches)
        done = [
            noted._replace(parts=parts, own=row, report=self._reports.pop(noted.step))
            for noted, row in zip(known, total, strict=True)
        ]
        if self.file is not None:
            self.file.append(*map(self._line, done))
        self._noted = self._noted[len(known) :]
        if self._is_live:
            self._newest = done

    def _read_again(self, noted: Noted) -> Noted:
        """The step with the numbers of all samples: those that no rank knows any more are read again."""
        batches, own = self._trainer.batches, noted.own.clone()
        for part in self._trainer.cut.parts(batches.samples_of(noted.step)):
            if part.index not in noted.parts:
                ids, key = batches.ids(noted.step, part), batches.key(noted.step, part)
                own[part.index] = _sum_of_batch(batches.loader.fetch(noted.epoch, ids, key))
        return noted._replace(own=own)

    def _line(self, noted: Noted) -> dict[str, Any]:
        report = noted.report
        assert report is not None, "in a live recovery the losses of each step are read in it"
        batches, count = self._trainer.batches, self._trainer.cut.count(report.samples)
        digits = [f"{number:016x}" for number in noted.own.numpy().view(np.uint64).tolist()]
        return {
            "kind": "step",
            "step": noted.step + 1,
            "epoch": noted.epoch,
            "ids": batches.ids_digest(noted.step),
            "contents": "".join(digits[:count]),
            "losses": _bits(report.losses[:count]),
            "lr": _bits(noted.rates),
            "state": "".join(digits[self._micro_batches :]),
        }


def state_digests(state: Mapping[str, Any]) -> dict[str, str]:
    """The SHA-256 of a `TrainState.state_dict` with whole tensors, and of the weights in it.

    Left out is how long training took, which is another at each run.
    """
    weights = weights_digest(state["model"])
    others = {name: state.get(name) for name in ("scaler", "schedule", "average", "callbacks")}
    position = {name: value for name, value in state["position"].items() if not name.startswith("trained_")}
    parts = {
        "model": weights,
        "optimizer": optimizer_digest(state["optimizer"]),
        "others": weights_digest(dict(named_tensors(others))),
        "position": {**position, "requires_grad": state.get("requires_grad", {})},
    }
    text = json.dumps(parts, sort_keys=True)
    return {"state_sha256": hashlib.sha256(text.encode()).hexdigest(), "weights_sha256": weights}


def _sum_of_batch(batch: Batch) -> Tensor:
    return _sum_of_all(position_sum(each) for each in tensors_of(batch))


def _sum_of_all(sums: Iterator[Tensor]) -> Tensor:
    """Their sum, in which each has an odd factor of its own."""
    found = [each * (2 * place + 1) for place, each in enumerate(sums)]
    return torch.stack(found).sum() if found else torch.zeros((), dtype=torch.int64)


def _bits(values: Sequence[float]) -> str:
    return "".join(struct.pack(">d", value).hex() for value in values)

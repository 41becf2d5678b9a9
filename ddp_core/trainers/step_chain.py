"""Fills the chain of a run: what each step was made of, and a checksum of what it has made.

Every rank notes what it has: of its micro-batches the samples, of weights and optimizer state what no rank before it
has. The ranks' numbers add up to those of a run in one process, so the chain is the same on every layout. They are put
together now and then, and before each save, since a run that is resumed goes on after a save.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
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
from ddp_core.data.trees import tensors_of
from ddp_core.observe.chain import OTHER_STATE, ChainFile, ChainPlan
from ddp_core.observe.step import StepBatch, StepObserver, StepReport

if TYPE_CHECKING:
    from ddp_core.trainers.trainer import Trainer

_TOGETHER = 32
"""So many steps, or a few more, are put together at a time: with several ranks they take a message."""
_FIRST_FACTOR = 3
"""Of the optimizer's entries in a tensor's number, beside its own 1; all are odd, so that no change is lost."""


class _Noted(NamedTuple):
    """A step that is not in the chain yet, as this rank knows it."""

    step: int
    epoch: int
    rates: list[float]
    own: Tensor
    """The numbers of the samples of each micro-batch, then those of each tensor; 0 where this rank has nothing."""


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
        self._noted: list[_Noted] = []
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

    def begin(self, step: int, start_sha256: str | None) -> None:
        """Begin the chain, or take it up after `step` (rank 0). Raises OSError, and UserError as `ChainFile` does."""
        assert self.file is not None
        if not self.plan.is_new:
            self.file.go_on(step)
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
            own[part.index] = _sum_of_all(position_sum(each) for each in tensors_of(tensors))
        self._contents = own

    def gradients_done(self, batch: StepBatch, reports: Sequence[StepReport]) -> None:
        self._reports |= {report.step: report for report in reports}

    def after_step(self, batch: StepBatch) -> None:
        assert self._contents is not None
        rates = [float(group["lr"]) for group in self._trainer.state.optimizer.param_groups]
        own = torch.cat([self._contents, self._state()])
        self._noted.append(_Noted(batch.step, batch.epoch, rates, own))
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
        """The sums of what no rank before this one has of a leaf of the state."""
        if isinstance(leaf, CutTensor):
            for start, piece in leaf.pieces.items():
                yield position_sum(piece, start)
        elif self._is_first:
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
        own = torch.stack([noted.own for noted in known]).cpu().numpy().view(np.uint64)
        total = sum(self._collectives.gather(own), start=np.zeros_like(own))
        reports = [self._reports.pop(noted.step) for noted in known]
        if self.file is not None:
            self.file.append(*map(self._line, known, reports, total))
        self._noted = self._noted[len(known) :]

    def _line(self, noted: _Noted, report: StepReport, row: Any) -> dict[str, Any]:
        batches, count = self._trainer.batches, self._trainer.cut.count(report.samples)
        digits = [f"{number:016x}" for number in row.tolist()]
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


def _sum_of_all(sums: Iterator[Tensor]) -> Tensor:
    """Their sum, in which each has an odd factor of its own."""
    found = [each * (2 * place + 1) for place, each in enumerate(sums)]
    return torch.stack(found).sum() if found else torch.zeros((), dtype=torch.int64)


def _bits(values: Sequence[float]) -> str:
    return "".join(struct.pack(">d", value).hex() for value in values)

"""Notes in a trial what each operation of one step has computed, and finds the first that differs between two."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from ddp_core.observe.operations import Operations, differing
from ddp_core.observe.step import StepBatch, StepObserver, StepReport
from ddp_core.trainers.noting import of_rank
from ddp_core.trainers.strategy import Strategy


class OperationNotes(StepObserver):
    """Notes the operations of the step after which `step` are done, by micro-batch, each rank in a file of its own."""

    def __init__(self, strategy: Strategy, step: int, file: Path) -> None:
        self._strategy, self._step = strategy, step
        self._file = _file_of(file, strategy.job.collectives.world.rank)
        self._noted: list[Operations] = []

    def before_step(self, batch: StepBatch) -> None:
        if batch.step + 1 == self._step:
            self._strategy.passes.loss = partial(self._loss, self._strategy.passes.loss)  # type: ignore[method-assign]

    def _loss(self, loss: Callable[..., Tensor], *words: Any) -> Tensor:
        self._noted.append(Operations(self._strategy.model))
        self._noted[-1].note("the batch", words[1:])
        with self._noted[-1]:
            return loss(*words)

    def gradients_done(self, batch: StepBatch, reports: Sequence[StepReport]) -> None:
        if batch.step + 1 == self._step:
            del self._strategy.passes.loss
            # A rank with fewer micro-batches than others may run a forward more.
            noted = zip(batch.micro_batches, self._noted, strict=False)
            self._file.write_text(json.dumps({part.index: each.noted for part, each in noted}))


def _file_of(notes: Path, rank: int) -> Path:
    """The file of this rank, beside its notes of the steps."""
    return of_rank(notes.with_name(f"{notes.name}-operations"), rank)


def first_other_operation(single: Path, several: Path, ranks: int) -> str:
    """The first operation whose result on some rank differs from one process's, in words; empty where none is found.

    `single` and `several` are the files of the notes. What only one of them has computed is not compared.
    """
    alone = json.loads(_file_of(single, 0).read_text())
    for rank in range(ranks):
        for micro_batch, noted in json.loads(_file_of(several, rank).read_text()).items():
            for what in differing(alone[micro_batch], noted):
                return f"{what}, in micro-batch {micro_batch}" + f" on rank {rank}" * (ranks > 1)
    return ""

"""The promise itself, tried while training: a micro-batch of the step, computed again elsewhere, has the same bits.

Its gradient depends on weights, micro-batch and step alone. So in some steps every process (in `dp` every replica)
computes one micro-batch of the step again, after its own and without a trace, and checksums are compared with those of
the pass that counted. What differs is code that keeps or draws something of its own, or a machine that computes
wrongly; passes from other states of the model then tell the one from the other.

Native numerics have bits of their own on each kind of CPU, so processes on unlike CPUs are not compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

from ddp_core.base.digests import checksum
from ddp_core.base.errors import UserError
from ddp_core.base.fingerprint import fingerprint
from ddp_core.base.gradient_sums import GradientSums
from ddp_core.config.cut import MicroBatch
from ddp_core.data.trees import Batch, tensors_of
from ddp_core.model.forward_state import ForwardState
from ddp_core.numerics.limits import rules_of
from ddp_core.observe.step import StepBatch
from ddp_core.reduction.batch_statistics import is_looked_after
from ddp_core.trainers.repeats import WAY_OUT, Computed, Repeats, compute_again, reason

if TYPE_CHECKING:
    from ddp_core.trainers.trainer import Trainer

_FIRST_STEPS = (1, 2, 4)
_SHARE = 0.0025
"""Of the time of training, for checks between saves; as much again is for those before a save."""
RANDOM = "samples come out differently at each read"
"""Why nothing can be computed again."""


@dataclass(frozen=True)
class Spot:
    """Where a micro-batch can be computed: a process, or a replica of `dp`."""

    name: str
    model: nn.Module
    tensors: Callable[[], Mapping[str, Tensor]]
    """What backward gives gradients to, by name."""
    run: Callable[[StepBatch, MicroBatch, Batch], Tensor]
    """Runs forward and backward of a micro-batch of the step, with its samples, and returns the loss."""
    within: Callable[[Callable[[], Computed]], Computed] = lambda function: function()
    """Calls a function in the thread that the spot's passes run in."""


class Answer(NamedTuple):
    """What one spot of one rank computed."""

    place: str
    """The spot's name."""
    kind: str
    """A digest of the fingerprint; processes of another kind have other bits."""
    data: str
    """The checksum of the samples, read again."""
    computed: Computed


@dataclass
class _Watched:
    """A micro-batch that is checked in this step, and the pass of it that counts, where this process makes it."""

    part: MicroBatch
    data: str | None
    """The checksum of its samples."""
    spot: str = ""
    gradients: GradientSums | None = None


@dataclass
class _Check:
    """What is computed again in this step."""

    spots: list[Spot]
    states: list[ForwardState]
    """Of each spot's model, before the step."""
    watched: dict[int, _Watched]
    """By the number of the micro-batch."""


class CrossCheck:
    """Computes one micro-batch again in the first, second and fourth step of an attempt, and then as often as it may.

    All spots of all ranks compute it. With `every_step`, every micro-batch of every step is computed again, by the spot
    after the one that has computed it. All ranks check in the same steps.
    """

    def __init__(self, trainer: Trainer, every_step: bool) -> None:
        self._trainer, self._every_step = trainer, every_step
        facts = fingerprint(trainer.device, rules_of(trainer.options.numerics))
        self._kind = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
        self.checks = 0
        """In how many steps something was computed again."""
        self.every: int | None = None
        """Steps between two checks; None until the cost is known."""
        self._first: int | None = None
        self._last, self._last_ended = 0, 0.0
        self._check: _Check | None = None

    def begin(self, batch: StepBatch, before_save: bool) -> None:
        """Choose a micro-batch of this step, if a check is due; call this before any of them is computed."""
        self._check = None
        if self._first is None:
            self._first, self._last_ended = batch.step, time.perf_counter()
        if self._trainer.checks.has_random_data or not self._is_due(batch.step, before_save):
            return
        parts = self._trainer.cut.parts(batch.samples)
        own = {part.index: _of_data(data) for part, data in zip(batch.micro_batches, batch.tensors, strict=True)}
        chosen = parts if self._every_step else [parts[self.checks % len(parts)]]
        spots = self._trainer.spots()
        states = [ForwardState(spot.model) for spot in spots]
        self._check = _Check(spots, states, {part.index: _Watched(part, own.get(part.index)) for part in chosen})

    @contextlib.contextmanager
    def watch(self, index: int, spot: int = 0) -> Iterator[None]:
        """Run the micro-batch `index` of the step inside, on this process's spot of this number."""
        if self._check is None or index not in self._check.watched:
            yield
            return
        watched, where = self._check.watched[index], self._check.spots[spot]
        with GradientSums(where.tensors()) as gradients:
            yield
        watched.spot, watched.gradients = where.name, gradients

    @property
    def is_under_way(self) -> bool:
        """Whether something of this step is to be computed again."""
        return self._check is not None

    def finish(self, batch: StepBatch) -> None:
        """Compute again what `begin` has chosen, and compare, before the update; a collective.

        Raises UserError on every rank where bits differ: 2 for code that does not repeat, 4 for a rank that computes
        wrongly.
        """
        check, self._check = self._check, None
        assert check is not None
        trainer, step_seconds, began = self._trainer, time.perf_counter() - self._last_ended, time.perf_counter()
        own = {index: self._answer_of(each) for index, each in check.watched.items() if each.gradients is not None}
        mine = {index: self._compute(batch, check, index, everywhere=not self._every_step) for index in check.watched}
        changed = _changed_buffer(check.states)
        seconds = time.perf_counter() - began
        everyones = trainer.job.collectives.gather((own, mine, seconds, step_seconds, changed))
        originals = {index: original for each in everyones for index, original in each[0].items()}
        if any(each[4] for each in everyones):
            self._refuse_counts(batch, check)
        for index in check.watched:
            original = originals[index]
            answers = [answer for each in everyones for answer in each[1][index]]
            if any(answer.data != original.data for answer in answers):
                ids = ", ".join(map(str, trainer.batches.ids(batch.step, check.watched[index].part)[:16]))
                trainer.checks.take_random_data(
                    f"samples {ids} are not the same when read again in step {batch.step + 1}"
                )
                return
            self._judge(batch, check, index, original, answers)
        self.checks += 1
        steps = batch.step - self._last if self.checks > 1 else 1
        per_step = min(each[3] for each in everyones) / max(steps, 1)
        if self.checks >= len(_FIRST_STEPS) and not self._every_step:
            self.every = max(1, math.ceil(max(each[2] for each in everyones) / (_SHARE * per_step)))
        self._last, self._last_ended = batch.step, time.perf_counter()

    def _answer_of(self, watched: _Watched) -> Answer:
        """What this process computed in the pass that counted."""
        assert watched.gradients is not None
        assert watched.data is not None
        loss = checksum(self._trainer.losses.newest_own[watched.part.index])
        return Answer(watched.spot, self._kind, watched.data, Computed(loss, watched.gradients.checksums(), {}))

    def _is_due(self, step: int, before_save: bool) -> bool:
        assert self._first is not None
        number, since = step - self._first + 1, step - self._last
        if self._every_step or number in _FIRST_STEPS:
            return True
        if self.every is None:
            return False
        return since >= self.every or (before_save and 2 * since >= self.every)

    def _compute(
        self,
        batch: StepBatch,
        check: _Check,
        index: int,
        everywhere: bool,
        put_back: Callable[[ForwardState], None] | None = ForwardState.put_back_buffers,
    ) -> list[Answer]:
        """What this process's spots compute, after `put_back` was called with each model's state of before the step.

        Not `everywhere`, but on the spot after the one that has computed it: where parameters are cut, all ranks do.
        The pass that counted began with the buffers of before the step.
        """
        trainer, part = self._trainer, check.watched[index].part
        world, batches = trainer.job.collectives.world, trainer.batches
        next_place = (batches.owner(batch.step, index) + 1) % max(world.world_size, len(check.spots))
        answers: list[Answer] = []
        for number, (spot, state) in enumerate(zip(check.spots, check.states, strict=True)):
            place = world.rank if len(check.spots) == 1 else number
            if not everywhere and trainer.state.ownership.has_whole_weights and place != next_place:
                continue
            data = batches.loader.fetch(batch.epoch, batches.ids(batch.step, part), batches.key(batch.step, part))
            read = _of_data(data)  # now, because a forward may change its inputs in place
            before = None if put_back is None else partial(put_back, state)
            run = partial(spot.run, batch, part, data)
            computed = spot.within(partial(compute_again, spot.model, spot.tensors(), run, before))
            answers.append(Answer(spot.name, self._kind, read, computed))
        return answers

    def _refuse_counts(self, batch: StepBatch, check: _Check) -> None:
        """Raise UserError where a further pass changes a buffer again that the step has changed; a collective.

        Such a buffer counts the micro-batches of this process. A table that is filled once holds the same ever after.
        """
        index = min(check.watched)
        before = [{name: checksum(each) for name, each in spot.model.named_buffers()} for spot in check.spots]
        after = self._compute(batch, check, index, everywhere=True, put_back=None)
        changed = (
            name
            for sums, answer in zip(before, after, strict=True)
            for name, value in sums.items()
            if answer.computed.buffers.get(name) != value
        )
        found = next(filter(None, self._trainer.job.collectives.gather(next(changed, None))), None)
        if found is not None:
            raise UserError(
                f"step {batch.step + 1}: every pass changes the buffer {found}, so it holds something else where a "
                f"process has more micro-batches; {WAY_OUT}"
            )

    def _judge(self, batch: StepBatch, check: _Check, index: int, original: Answer, answers: Sequence[Answer]) -> None:
        """Raise UserError where the passes have other bits; all arguments but `check` are the same on all ranks."""
        alike = [each.computed for each in answers if each.kind == original.kind]
        pairs = [(one, other) for other in alike for one in (original.computed, alike[0])]
        found = next((difference for one, other in pairs if (difference := one.difference(other))), None)
        if found is None:
            return
        # Ranks that begin with other weights or buffers rightly have other gradients.
        self._trainer.checks.compare_states(f"in step {batch.step + 1}")

        def everywhere(put_back: Callable[[ForwardState], None] = ForwardState.put_back_buffers) -> dict[str, Computed]:
            ours = self._compute(batch, check, index, True, put_back)
            theirs = [each for theirs in self._trainer.job.collectives.gather(ours) for each in theirs]
            return {each.place: each.computed for each in theirs if each.kind == original.kind}

        repeats = Repeats(original.computed, everywhere(), everywhere(), everywhere(ForwardState.put_back))
        what = f"step {batch.step + 1}, micro-batch {index}"
        buffers = self._trainer.job.collectives.gather(_changed_buffer(check.states))
        buffer = next(filter(None, buffers), None)
        raise reason(what, found, original.place, repeats, buffer, is_first_step=batch.step == self._first)


def _changed_buffer(states: Sequence[ForwardState]) -> str | None:
    """The first buffer that the step's passes have changed here, beside those that BatchStatistics looks after."""
    changed = (each for state in states for each in state.changed_buffers())
    return next((full for layer, name, full in changed if not is_looked_after(layer, name)), None)


def _of_data(data: Batch) -> str:
    """A checksum of a micro-batch's samples."""
    return hashlib.sha256("".join(checksum(tensor) for tensor in tensors_of(data)).encode()).hexdigest()[:16]

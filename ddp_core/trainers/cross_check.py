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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ddp_core.base.digests import checksum, digest_of_sums, sums
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.fingerprint import fingerprint
from ddp_core.base.user_code import our_code
from ddp_core.config.cut import MicroBatch
from ddp_core.data.trees import Batch, map_tensors, tensors_of
from ddp_core.model.forward_state import ForwardState
from ddp_core.observe.step import StepBatch

if TYPE_CHECKING:
    from ddp_core.trainers.trainer import Trainer

_FIRST_STEPS = (1, 2, 4)
_SHARE = 0.005
"""Of the time of training, for checks between saves; as much again is for those before a save."""
_WAY_OUT = (
    "so the result depends on the layout: let it follow from weights, samples and step alone, or go on with "
    "--on-difference warn"
)
REPLICA = "replica "
"""Begins the names of the replicas of `dp`."""


@dataclass(frozen=True)
class Computed:
    """Checksums of what one pass of a micro-batch gave."""

    loss: str
    gradients: Mapping[str, str]
    buffers: Mapping[str, str]
    """Of the model's buffers after the pass; empty for the pass that counted, in which they hold other things."""

    def difference(self, other: Computed) -> str | None:
        """What differs first, in words; None where both have the same bits."""
        if self.loss != other.loss:
            return "the loss"
        for kind, ours, theirs in (
            ("the gradient of", self.gradients, other.gradients),
            ("the buffer", self.buffers, other.buffers),
        ):
            for name in {**ours, **theirs} if ours and theirs else ():
                if ours.get(name) != theirs.get(name):
                    return f"{kind} {name}"
        return None

    @property
    def bits(self) -> str:
        """A digest of loss and gradients."""
        return hashlib.sha256(repr((self.loss, sorted(self.gradients.items()))).encode()).hexdigest()[:16]


class GradientSums:
    """Notes checksums of the gradients that a backward makes for `tensors`, before anything is done with them.

    The hooks are on autograd's nodes: those of a tensor may be shared with other replicas.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._nodes = {name: get_gradient_edge(each).node for name, each in tensors.items() if each.requires_grad}
        self._sums: dict[str, list[Tensor]] = {}
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> GradientSums:
        self._sums = {}
        self._hooks = [node.register_prehook(partial(self._made, name)) for name, node in self._nodes.items()]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def checksums(self) -> dict[str, str]:
        """By name; on CUDA this waits for the device."""
        return {name: digest_of_sums(parts) for name, parts in self._sums.items()}

    @our_code
    def _made(self, name: str, gradients: tuple[Tensor | None, ...]) -> None:
        # A layer that is computed again in backward (activation checkpointing) may hand its part over by itself.
        self._sums.setdefault(name, []).extend(sums(each) for each in gradients if each is not None)


def compute_again(
    model: nn.Module, tensors: Mapping[str, Tensor], run: Callable[[], Tensor], before: Callable[[], None] | None = None
) -> Computed:
    """What one pass gives: `run` makes forward and backward of a micro-batch and returns its loss. It leaves no trace.

    `tensors` get the gradients. `before` changes the model's buffers and attributes for this pass.
    """
    now = ForwardState(model)
    kept = [(tensor, tensor.grad) for tensor in (*tensors.values(), *model.parameters())]
    try:
        for tensor, _ in kept:
            tensor.grad = None
        if before is not None:
            before()
        with GradientSums(tensors) as gradients:
            loss = run()
        buffers = {name: checksum(buffer) for name, buffer in model.named_buffers()}
        return Computed(checksum(loss), gradients.checksums(), buffers)
    finally:
        for tensor, gradient in kept:
            tensor.grad = gradient
        now.put_back()


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


class Place(NamedTuple):
    """Where a pass was made, of all ranks."""

    name: str
    kind: str
    """A digest of the fingerprint; processes of another kind have other bits."""


@dataclass
class _Watched:
    """The micro-batch of this step that is checked, and the pass of it that counts."""

    part: MicroBatch
    spots: list[Spot]
    states: list[ForwardState]
    """Of each spot's model, before the step."""
    data: str | None
    """The checksum of its samples, where this process computes it."""
    gradients: GradientSums | None = None


class CrossCheck:
    """Computes one micro-batch again in the first, second and fourth step of an attempt, and then as often as it may.

    `every_step` checks every step. `seconds` and steps are agreed on by all ranks, so all check in the same steps.
    """

    def __init__(self, trainer: Trainer, every_step: bool) -> None:
        self._trainer, self._every_step = trainer, every_step
        rules = 1 if trainer.options.numerics == "portable" else None
        self._kind = hashlib.sha256(repr(fingerprint(trainer.device, rules)).encode()).hexdigest()[:16]
        self.checks = 0
        """How many were made."""
        self.hindrance: str | None = None
        """Why nothing can be computed again, where that is so."""
        self.every: int | None = None
        """Steps between two checks; None until the cost is known."""
        self._first: int | None = None
        self._last, self._last_ended = 0, 0.0
        self._watched: _Watched | None = None

    def begin(self, batch: StepBatch, before_save: bool) -> None:
        """Choose a micro-batch of this step, if a check is due; call this before any of them is computed."""
        self._watched = None
        if self._first is None:
            self._first, self._last_ended = batch.step, time.perf_counter()
        if self.hindrance is not None or not self._is_due(batch.step, before_save):
            return
        trainer = self._trainer
        part = trainer.cut.parts(batch.samples)[self.checks % trainer.cut.count(batch.samples)]
        own = next((position for position, mine in enumerate(batch.micro_batches) if mine.index == part.index), None)
        data = None if own is None else _of_data(batch.tensors[own])
        spots = trainer.spots()
        self._watched = _Watched(part, spots, [ForwardState(spot.model) for spot in spots], data)

    @contextlib.contextmanager
    def watch(self, index: int, spot: int = 0) -> Iterator[None]:
        """Run the micro-batch `index` of the step inside, on this process's spot of this number."""
        watched = self._watched
        if watched is None or watched.part.index != index:
            yield
            return
        watched.gradients = GradientSums(watched.spots[spot].tensors())
        with watched.gradients:
            yield

    @property
    def is_under_way(self) -> bool:
        """Whether a micro-batch of this step is to be computed again."""
        return self._watched is not None

    def finish(self, batch: StepBatch) -> None:
        """Compute the chosen micro-batch again and compare, before the update; a collective.

        Raises UserError on every rank where bits differ: 2 for code that does not repeat, 4 for a rank that computes
        wrongly.
        """
        watched, self._watched = self._watched, None
        assert watched is not None
        trainer, step_seconds = self._trainer, time.perf_counter() - self._last_ended
        began = time.perf_counter()
        original = None
        if watched.gradients is not None:
            loss = trainer.losses.newest_own[watched.part.index]
            original = Computed(checksum(loss), watched.gradients.checksums(), {})
        data = self._read_again(batch, watched)
        read = trainer.job.collectives.gather((watched.data, _of_data(data)))
        if len({again for _, again in read} | {first for first, _ in read if first is not None}) > 1:
            self.hindrance = "samples come out differently at each read"
            ids = ", ".join(map(str, trainer.batches.ids(batch.step, watched.part)[:16]))
            trainer.take_random_data(f"samples {ids} are not the same when read again in step {batch.step + 1}")
            return
        answers = self._everywhere(batch, watched, data)
        all_own = trainer.job.collectives.gather((original, time.perf_counter() - began, step_seconds))
        originals = [each[0] for each in all_own]
        self._judge(batch, watched, data, answers, next(each for each in originals if each is not None))
        self.checks += 1
        seconds, steps = max(each[1] for each in all_own), batch.step - self._last if self.checks > 1 else 1
        per_step = min(each[2] for each in all_own) / max(steps, 1)
        if self.checks >= len(_FIRST_STEPS):
            self.every = max(1, math.ceil(seconds / (_SHARE * per_step))) if per_step else 1
        self._last, self._last_ended = batch.step, time.perf_counter()

    def _is_due(self, step: int, before_save: bool) -> bool:
        assert self._first is not None
        number, since = step - self._first + 1, step - self._last
        if self._every_step or number in _FIRST_STEPS:
            return True
        if self.every is None:
            return False
        return since >= self.every or (before_save and 2 * since >= self.every)

    def _read_again(self, batch: StepBatch, watched: _Watched) -> Batch:
        """The samples of the micro-batch, from the data set."""
        batches = self._trainer.batches
        ids, key = batches.ids(batch.step, watched.part), batches.key(batch.step, watched.part)
        return batches.loader.fetch(batch.epoch, ids, key)

    def _everywhere(
        self, batch: StepBatch, watched: _Watched, data: Batch, as_before: bool = False
    ) -> list[tuple[Place, Computed]]:
        """What all spots of all ranks compute now; with `as_before` from the attributes of models before the step.

        Buffers are always those of before the step, as they were for the pass that counted.
        """
        mine = []
        for spot, state in zip(watched.spots, watched.states, strict=True):
            fresh = map_tensors(Tensor.clone, data)  # a forward may change its inputs in place
            change = state.put_back if as_before else state.put_back_buffers
            run = partial(spot.run, batch, watched.part, fresh)
            computed = spot.within(partial(compute_again, spot.model, spot.tensors(), run, change))
            mine.append((Place(spot.name, self._kind), computed))
        return [answer for theirs in self._trainer.job.collectives.gather(mine) for answer in theirs]

    def _judge(
        self,
        batch: StepBatch,
        watched: _Watched,
        data: Batch,
        answers: Sequence[tuple[Place, Computed]],
        original: Computed,
    ) -> None:
        """Raise UserError where the passes have other bits. `answers` and `original` are the same on all ranks."""
        what = f"step {batch.step + 1}, micro-batch {watched.part.index}"
        mine = answers[self._trainer.batches.owner(batch.step, watched.part.index)][0]

        def alike(of_all: Sequence[tuple[Place, Computed]]) -> dict[str, Computed]:
            return {place.name: each for place, each in of_all if place.kind == mine.kind}

        now = alike(answers)
        pairs = [(original, each) for each in now.values()] + [(now[mine.name], each) for each in now.values()]
        found = next((difference for one, other in pairs if (difference := one.difference(other))), None)
        if found is not None:
            again = alike(self._everywhere(batch, watched, data))
            earlier = alike(self._everywhere(batch, watched, data, as_before=True))
            raise _verdict(what, found, mine.name, Repeats(original, now, again, earlier), batch.step == self._first)


@dataclass(frozen=True)
class Repeats:
    """Passes of one micro-batch: the one that counted, and by place those of now, again, and of earlier attributes."""

    original: Computed
    now: Mapping[str, Computed]
    again: Mapping[str, Computed]
    earlier: Mapping[str, Computed]

    def changing(self, other: Mapping[str, Computed]) -> list[str]:
        """The places with other bits in `other` than now."""
        return [name for name in self.now if self.now[name].difference(other[name])]

    @property
    def outliers(self) -> list[str]:
        """The places with other bits than most."""
        usual = Counter(each.bits for each in self.now.values()).most_common(1)[0][0]
        return [name for name, each in self.now.items() if each.bits != usual]

    @property
    def differ_everywhere(self) -> bool:
        """Whether the loss and most gradients differ, as where other code ran; few machines spoil so much."""
        for each in self.now.values():
            ours, theirs = self.original.gradients, each.gradients
            other = sum(ours.get(name) != theirs.get(name) for name in {**ours, **theirs})
            if self.original.loss != each.loss and 2 * other > len(ours):
                return True
        return False


def _verdict(what: str, found: str, owner: str, passes: Repeats, is_first_step: bool) -> UserError:
    """Why the passes have other bits: code that draws or keeps something (2), or a machine (4).

    Of three places or more, one that differs alone is the machine's fault, and `owner` where only its pass in the step
    differs.
    """
    names, outliers = list(passes.now), passes.outliers
    unsteady, keeping = passes.changing(passes.again), passes.changing(passes.earlier)
    can_tell = len(names) > 2
    one_alone = can_tell and len(outliers) == 1 and {*unsteady, *keeping} <= {*outliers}
    other = f"{what}: {found} has other bits when it is computed again"
    suspicion = (
        "suspect its memory, processor or accelerator: resume without this machine, or go on with --on-difference warn"
    )
    if unsteady and not one_alone:
        return UserError(
            f"{other}, and others each time ({', '.join(unsteady)}): the model, its loss or a hook draws from a random "
            f"generator of its own, reads a clock, or keeps something that every pass changes; {_WAY_OUT}"
        )
    if keeping and not one_alone:
        return UserError(
            f"{other} after other passes ({', '.join(keeping)}): the model, its loss or a hook keeps something in an "
            f"attribute, which each forward changes; {_WAY_OUT}"
        )
    if not outliers:
        if is_first_step and passes.differ_everywhere:
            return UserError(
                f"{other} ({', '.join(names)}): the first pass does something that later ones do not; {_WAY_OUT}"
            )
        return UserError(
            f"{other}, the same in every later pass ({', '.join(names)}): {owner} has computed it wrongly once; "
            f"{suspicion}",
            ExitCode.RESOURCES,
        )
    if all(name.startswith(REPLICA) for name in names):
        return UserError(
            f"{other} by another replica ({', '.join(outliers)} of {len(names)}): a hook, a closure or an attribute "
            f"leads to the model itself, of which each replica is a copy; {_WAY_OUT}"
        )
    if one_alone:
        return UserError(
            f"{other}: {outliers[0]} computes it wrongly, since the other {len(names) - 1} agree. Unless code does "
            f"something else on this rank, {suspicion}",
            ExitCode.RESOURCES,
        )
    if can_tell or passes.differ_everywhere:
        return UserError(
            f"{other} on another rank ({', '.join(names)}): forward or a hook does something else on each rank, as "
            f"where RANK, a path or the time says so, or else a machine computes wrongly; {_WAY_OUT}"
        )
    return UserError(
        f"{other}: one of {' and '.join(names)} computes it wrongly, and two cannot tell which. Unless code does "
        f"something else on one of them, {suspicion}",
        ExitCode.RESOURCES,
    )


def _of_data(data: Batch) -> str:
    """A checksum of a micro-batch's samples."""
    return hashlib.sha256("".join(checksum(tensor) for tensor in tensors_of(data)).encode()).hexdigest()[:16]

"""Passes of one micro-batch: what each gave, as checksums, and why they have other bits.

Code that draws or keeps something of its own gives other bits in other passes, and so does a machine that computes
wrongly. Passes from other states of the model, and those of other ranks, tell the one from the other.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from ddp_core.base.digests import checksum
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.gradient_sums import GradientSums
from ddp_core.model.forward_state import ForwardState
from ddp_core.reduction import BatchStatistics

WAY_OUT = (
    "so the result depends on the layout: let it follow from weights, samples and step alone, or go on with "
    "--on-difference warn"
)
"""How a message ends that blames code."""
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


def compute_again(
    model: nn.Module, tensors: Mapping[str, Tensor], run: Callable[[], Tensor], before: Callable[[], None] | None = None
) -> Computed:
    """What one pass gives: `run` makes forward and backward of a micro-batch and returns its loss. It leaves no trace.

    `tensors` get the gradients. `before` changes the model's buffers and attributes for this pass.
    """
    now, statistics = ForwardState(model), BatchStatistics(model)
    kept = [(tensor, tensor.grad) for tensor in (*tensors.values(), *model.parameters())]
    try:
        for tensor, _ in kept:
            tensor.grad = None
        if before is not None:
            before()
        statistics.begin()
        with GradientSums(tensors) as gradients:
            loss = run()
        buffers = {"of batch norm": checksum(statistics.take())}
        statistics.restore()
        buffers |= {name: checksum(buffer) for name, buffer in model.named_buffers()}
        return Computed(checksum(loss), gradients.checksums(), buffers)
    finally:
        statistics.restore()
        for tensor, gradient in kept:
            tensor.grad = gradient
        now.put_back()


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


def reason(what: str, found: str, owner: str, passes: Repeats, buffer: str | None, is_first_step: bool) -> UserError:
    """Why the passes have other bits: code that draws or keeps something (2), or a machine (4).

    `buffer` is one that the step's passes have changed; later passes began with its values from before the step. Of
    three places or more, one that differs alone is the machine's fault, and `owner` where only its pass in the step
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
            f"generator of its own, reads a clock, or keeps something that every pass changes; {WAY_OUT}"
        )
    if keeping and not one_alone:
        return UserError(
            f"{other} after other passes ({', '.join(keeping)}): the model, its loss or a hook keeps something in an "
            f"attribute, which each forward changes; {WAY_OUT}"
        )
    if not outliers:
        if buffer is not None:
            return UserError(
                f"{other}, the same in every later pass ({', '.join(names)}): forward changes the buffer {buffer}, so "
                f"each micro-batch begins with another one; {WAY_OUT}"
            )
        if is_first_step and passes.differ_everywhere:
            return UserError(
                f"{other} ({', '.join(names)}): the first pass does something that later ones do not; {WAY_OUT}"
            )
        return UserError(
            f"{other}, the same in every later pass ({', '.join(names)}): {owner} has computed it wrongly once; "
            f"{suspicion}",
            ExitCode.RESOURCES,
        )
    if all(name.startswith(REPLICA) for name in names):
        return UserError(
            f"{other} by another replica ({', '.join(outliers)} of {len(names)}): a hook, a closure or an attribute "
            f"leads to the model itself, of which each replica is a copy; {WAY_OUT}"
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
            f"where RANK, a path or the time says so, or else a machine computes wrongly; {WAY_OUT}"
        )
    return UserError(
        f"{other}: one of {' and '.join(names)} computes it wrongly, and two cannot tell which. Unless code does "
        f"something else on one of them, {suspicion}",
        ExitCode.RESOURCES,
    )

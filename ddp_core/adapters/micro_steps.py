"""What happens around each forward and backward of somebody else's loop, so that its steps become exact ones.

The gradient of a micro-batch may depend on the weights, the micro-batch and the step, and on nothing else. In steps 1,
2, 4, 8 … one micro-batch is kept, and computed again when the others of the step are done: by the rank that had it, and
by all others. Where loss or gradient are other ones, something else has a part in them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ddp_core.base.digests import checksum, digest_of_sums, sums
from ddp_core.base.errors import UserError
from ddp_core.base.seeds import MicroBatchSeed
from ddp_core.base.user_code import our_code
from ddp_core.reduction import ExactReduction
from ddp_core.reduction.agreement import gathered, require_equal_weights

Again = Callable[[Any], Tensor]
"""Runs forward and backward of a micro-batch from what was kept of it, and returns the loss."""


def is_due(number: int) -> bool:
    """Whether something is checked the `number`-th time: 1, 2, 4, 8 …"""
    return number.bit_count() == 1


class RepeatCheck:
    """Keeps one micro-batch of a step that is due, and computes it again; a collective where there are several ranks.

    It holds no process group: whoever does keeps gloo's threads running when the group is destroyed.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        several = dist.is_available() and dist.is_initialized()
        self._rank, self._world_size = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        self._kept: bytes | None = None
        self._sums: dict[str, str] = {}

    def keep(self, inputs: Any) -> None:
        """Keep what the micro-batch is computed from, as it is before forward."""
        buffer = io.BytesIO()
        try:
            torch.save(inputs, buffer)
        except Exception:
            return  # what cannot be sent is not checked
        self._kept, self._sums = buffer.getvalue(), {}

    @contextmanager
    def watch(self) -> Iterator[Callable[[Tensor], None]]:
        """Run the backward of the kept micro-batch inside, then call what this gives with its loss."""
        with self._gradients(self._sums):
            yield lambda loss: self._sums.update(loss=checksum(loss))

    def compute_again(self, step: int, index: int, seed: Callable[[int, int], None], again: Again) -> None:
        """Compute the kept micro-batch, `index` of the step, again on every rank, between the backwards of a step.

        Leaves gradients and buffers as they are. Raises UserError on every rank where the bits are other ones.
        """
        owner = index % self._world_size
        box = [(self._kept, self._sums) if self._rank == owner else (None, {})]
        if self._world_size > 1:
            dist.broadcast_object_list(box, src=owner)
        kept, before = box[0]
        if kept is None or "loss" not in before:
            return
        buffers = [(buffer, buffer.clone()) for buffer in self._module.buffers()]
        seed(step, index)

        def here(storage: Any, place: str) -> Any:
            return storage if place.startswith("cpu") else storage.cuda(self._device)

        inputs = torch.load(io.BytesIO(kept), map_location=here, weights_only=False)
        now: dict[str, str] = {}
        with self._gradients(now):
            now["loss"] = checksum(again(inputs))
        for parameter in self._module.parameters():
            parameter.grad = None
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        self._kept = None
        found = next((name for name in (*before, *now) if before.get(name) != now.get(name)), None)
        everyones = gathered(found, dist.group.WORLD)
        others = [rank for rank, theirs in enumerate(everyones) if theirs is not None]
        if others:
            raise UserError(
                f"step {step + 1}: micro-batch {index}, which rank {owner} has computed, has "
                f"another {everyones[others[0]]} when rank {', '.join(map(str, others))} of {self._world_size} "
                "computes it again, so it does not follow from the weights, the micro-batch and the step alone, and "
                "another number of ranks would end with other weights. Look for a random generator of its own, a "
                "counter or a cache in an attribute, the number of the batch or RANK, in the model or its loss; where "
                "no code does such a thing, the ranks' processors differ, or one of them computes wrongly"
            )

    @contextmanager
    def _gradients(self, found: dict[str, str]) -> Iterator[None]:
        """Note in `found` checksums of the gradients that the backward inside makes, before anything is done with them.

        The hooks are on autograd's nodes: those of a parameter may be shared with other replicas.
        """
        made: dict[str, list[Tensor]] = {}

        @our_code
        def note(name: str, gradients: tuple[Tensor | None, ...]) -> None:
            # A layer that is computed again in backward (activation checkpointing) may hand its part over by itself.
            made.setdefault(name, []).extend(sums(each) for each in gradients if each is not None)

        named = [(name, each) for name, each in self._module.named_parameters() if each.requires_grad]
        nodes = [(name, get_gradient_edge(each).node) for name, each in named]
        hooks = [node.register_prehook(partial(note, name)) for name, node in nodes]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        found |= {f"gradient of {name}": digest_of_sums(parts) for name, parts in made.items()}


class MicroSteps:
    """Counts a loop's micro-batches, seeds each, and completes the exact reduction after the last of a step.

    `module` is the model without DistributedDataParallel; every rank starts with rank 0's weights and buffers. Rank r
    of W computes the micro-batches r, r + W, … of the `micro_batches` of a step, in this order. For each:

        steps.begin()                                  # seeds all generators by (seed, step, micro-batch)
        loss = mean_loss(module(x), y)
        with steps.backward(scale=1 / micro_batches):  # after the last of a step, every `grad` is the sum times scale
            loss.backward()

    After the last, the generators are seeded by (seed, step), for the update. After updates 1, 2, 4, 8 … the ranks
    compare their weights. Where whoever runs forward and backward can run them again (`can_repeat`), one micro-batch of
    steps 1, 2, 4, 8 … is (`RepeatCheck`). Raises UserError where bits differ.
    """

    def __init__(self, module: nn.Module, micro_batches: int, seed: int, device: torch.device) -> None:
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if group is not None:
            for tensor in module.state_dict().values():
                dist.broadcast(tensor, src=0, group=group)
        self._module, self._ranks = module, 1 if group is None else group.size()
        self._exact = ExactReduction(module, micro_batches, process_group=group, shares="strided")
        self._seed = MicroBatchSeed(seed, device, at_once=True)
        self._check = RepeatCheck(module, device)
        self._again: Again | None = None
        self._begun = False
        self.step = 0
        """Steps completed: the number of the step that the next micro-batch belongs to."""

    @property
    def whole(self) -> bool:
        """Whether no micro-batch is missing: the gradients of a step are complete, or none of the next has been run."""
        return len(self._exact.remaining) == len(self._exact.share)

    @property
    def is_training(self) -> bool:
        """Whether what is read now is trained on: not while the model is in evaluation mode, or makes no gradients."""
        return self._module.training and torch.is_grad_enabled()

    def can_repeat(self, again: Again) -> None:
        """Say how a micro-batch is computed again, from what `begin` gets of each; it is not part of the step then."""
        self._again = again

    def begin(self, inputs: Any = None) -> None:
        """Start this rank's next micro-batch, computed from `inputs`; nothing if it has begun already."""
        if not self._begun:
            if self.whole:
                self._exact.begin()
            if self._is_checked:
                self._check.keep(inputs)
            self._seed(self.step, self._exact.remaining[0])
            self._begun = True

    @contextmanager
    def backward(self, scale: float) -> Iterator[Callable[[Tensor], None]]:
        """Run the backward of the micro-batch inside. After the last of a step, every `grad` is complete.

        Where micro-batches can be repeated, call what this gives with the loss, after the backward. Raises UserError
        where no micro-batch has begun.
        """
        if not self._begun:
            raise UserError(
                "a second backward in one micro-batch, or one outside of it: add the losses up, and call backward once"
            )
        watched = self._check.watch() if self._is_checked else nullcontext(lambda loss: None)
        with self._exact.micro_batch(self._exact.remaining[0]), watched as done:
            yield done
        self._begun = False
        if not self._exact.remaining:
            if self._again is not None and is_due(self.step + 1):
                self._check.compute_again(self.step, self._checked, self._seed, self._again)
            self._exact.finish(scale)
            self._seed.update(self.step)
            self.step += 1

    @property
    def _checked(self) -> int:
        """The micro-batch that is computed again in a step that is due: another one each time."""
        return (self.step + 1).bit_length() % self._exact.micro_batches

    @property
    def _is_checked(self) -> bool:
        """Whether the micro-batch at hand is computed again."""
        due = self._again is not None and is_due(self.step + 1)
        return due and self._exact.remaining[0] == self._checked

    def require_same_weights(self) -> None:
        """Compare weights and buffers with those of the other ranks; a collective, which raises OtherWeights on all."""
        if self._ranks > 1:
            assert dist.group.WORLD is not None
            require_equal_weights(dist.group.WORLD, self._module, f"after step {self.step}")

    def require_whole(self, what: str) -> None:
        """Raises UserError in the middle of a step; `what` begins the message."""
        if not self.whole:
            raise UserError(
                f"{what} in the middle of a step: {len(self._exact.remaining)} micro-batches of this rank are missing. "
                "Let an epoch have whole steps only (ddp_core.adapters.dealing.WholeSteps), "
                "and evaluate or save between two steps"
            )

    def close(self) -> None:
        """End the reduction's thread and process group."""
        self._exact.close()

    def state_dict(self) -> dict[str, int]:
        """The number of completed steps: all that random numbers depend on beside the seed."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the saved step."""
        self.step = state["step"]

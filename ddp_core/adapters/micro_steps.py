"""What happens around each forward and backward of somebody else's loop, so that its steps become exact ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_core.base.errors import UserError
from ddp_core.base.seeds import MicroBatchSeed
from ddp_core.reduction import ExactReduction
from ddp_core.reduction.agreement import require_equal_weights

from .repeat_check import Again, RepeatCheck, is_due


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

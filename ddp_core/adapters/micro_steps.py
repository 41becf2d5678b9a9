"""What happens around each forward and backward of somebody else's loop, so that its steps become exact ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from ddp_core.base.errors import UserError
from ddp_core.base.seeds import MicroBatchSeed
from ddp_core.reduction import ExactReduction


class MicroSteps:
    """Counts a loop's micro-batches, seeds each, and completes the exact reduction after the last of a step.

    `module` is the model without DistributedDataParallel; every rank starts with rank 0's weights and buffers. Rank r
    of W computes the micro-batches r, r + W, … of the `micro_batches` of a step, in this order. For each:

        steps.begin()                                  # seeds the generator of `device` by (seed, step, micro-batch)
        loss = mean_loss(module(x), y)
        with steps.backward(scale=1 / micro_batches):  # after the last of a step, every `grad` is the sum times scale
            loss.backward()
    """

    def __init__(self, module: nn.Module, micro_batches: int, seed: int, device: torch.device) -> None:
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if group is not None:
            for tensor in module.state_dict().values():
                dist.broadcast(tensor, src=0, group=group)
        self._exact = ExactReduction(module, micro_batches, process_group=group, shares="strided")
        self._seed = MicroBatchSeed(seed, device)
        self._begun = False
        self.step = 0
        """Steps completed: the number of the step that the next micro-batch belongs to."""

    @property
    def whole(self) -> bool:
        """Whether no micro-batch is missing: the gradients of a step are complete, or none of the next has been run."""
        return len(self._exact.remaining) == len(self._exact.share)

    def begin(self) -> None:
        """Start this rank's next micro-batch; nothing if it has begun already."""
        if not self._begun:
            if self.whole:
                self._exact.begin()
            self._seed(self.step, self._exact.remaining[0])
            self._begun = True

    @contextmanager
    def backward(self, scale: float) -> Iterator[None]:
        """Run the backward of the micro-batch inside. After the last of a step, every `grad` is complete.

        Raises UserError where no micro-batch has begun.
        """
        if not self._begun:
            raise UserError(
                "a second backward in one micro-batch, or one outside of it: add the losses up, and call backward once"
            )
        with self._exact.micro_batch(self._exact.remaining[0]):
            yield
        self._begun = False
        if not self._exact.remaining:
            self._exact.finish(scale)
            self.step += 1

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

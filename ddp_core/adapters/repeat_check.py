"""A micro-batch of somebody else's loop computed again, by every rank: the same bits, or the promise is broken.

The gradient of a micro-batch may depend on the weights, the micro-batch and the step, and on nothing else. In steps 1,
2, 4, 8 … one micro-batch is kept, and computed again when the others of the step are done: by the rank that had it, and
by all others. Where loss or gradient are other ones, something else has a part in them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_core.base.digests import checksum
from ddp_core.base.errors import UserError
from ddp_core.base.gradient_sums import GradientSums
from ddp_core.reduction.agreement import gathered

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
        with self._gradients() as gradients:
            yield lambda loss: self._sums.update(loss=checksum(loss))
        self._sums |= _named(gradients)

    def compute_again(self, step: int, index: int, seed: Callable[[int, int], None], again: Again) -> None:
        """Compute the kept micro-batch, `index` of the step, again on every rank, between the backwards of a step.

        Leaves gradients and buffers as they are. Raises UserError on every rank where the bits are other ones.
        """
        kept, sums = self._from(index % self._world_size)
        if kept is None or "loss" not in sums:
            return
        buffers = [(buffer, buffer.clone()) for buffer in self._module.buffers()]
        seed(step, index)
        inputs = torch.load(io.BytesIO(kept), map_location=self._here, weights_only=False)
        with self._gradients() as gradients:
            loss = again(inputs)
        now = {"loss": checksum(loss), **_named(gradients)}
        for parameter in self._module.parameters():
            parameter.grad = None
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        self._kept = None
        found = next((name for name in (*sums, *now) if sums.get(name) != now.get(name)), None)
        everyones = gathered(found, dist.group.WORLD)
        others = [rank for rank, theirs in enumerate(everyones) if theirs is not None]
        if others:
            raise UserError(
                f"step {step + 1}: micro-batch {index}, which rank {index % self._world_size} has computed, has "
                f"another {everyones[others[0]]} when rank {', '.join(map(str, others))} of {self._world_size} "
                "computes it again, so it does not follow from the weights, the micro-batch and the step alone, and "
                "another number of ranks would end with other weights. Look for a random generator of its own, a "
                "counter or a cache in an attribute, the number of the batch or RANK, in the model or its loss; where "
                "no code does such a thing, the ranks' processors differ, or one of them computes wrongly"
            )

    def _here(self, storage: Any, place: str) -> Any:
        """A storage that another rank has sent, on this rank's device, unless it was in host memory."""
        return storage if place.startswith("cpu") else storage.cuda(self._device)

    def _from(self, owner: int) -> tuple[bytes | None, dict[str, str]]:
        """What the rank that has computed the micro-batch keeps, and its sums."""
        box = [(self._kept, self._sums) if self._rank == owner else (None, {})]
        if self._world_size > 1:
            dist.broadcast_object_list(box, src=owner)
        return box[0]

    def _gradients(self) -> GradientSums:
        return GradientSums(dict(self._module.named_parameters()))


def _named(gradients: GradientSums) -> dict[str, str]:
    return {f"gradient of {name}": each for name, each in gradients.checksums().items()}

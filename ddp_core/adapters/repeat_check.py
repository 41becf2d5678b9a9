"""A micro-batch of somebody else's loop computed again, by every rank: the same bits, or the promise is broken.

The gradient of a micro-batch may depend on the weights, the micro-batch and the step, and on nothing else. In steps 1,
2, 4, 8 … one micro-batch is kept, and computed again when the others of the step are done: by the rank that had it, and
by all others. Where loss or gradient are other ones, something else has a part in them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ddp_core.base.digests import checksum, digest_of_sums, sums
from ddp_core.base.errors import UserError
from ddp_core.base.user_code import our_code
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

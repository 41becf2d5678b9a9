"""What a rank owns where state is cut among ranks, and how all ranks' parts make up the whole again."""

from __future__ import annotations

import contextlib
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ddp_core.checkpoint import CutTensor
from ddp_core.checkpoint.state import replaced
from ddp_core.reduction import ExactReduction

from .owned import Owned
from .ownership import Ownership
from .shards import refuse_shared_memory
from .updates import OwnUpdates, require_elementwise


class OwnsPart(Ownership):
    """What one of the ranks of `process_group` owns: a part of the parameters that are cut.

    Raises UserError (2) for an optimizer that may not treat each element by itself (`require_elementwise`), and for a
    parameter whose memory another one has, too.
    """

    reduction: ExactReduction
    """Sums the gradients, and gives those of this rank's part to what its optimizer updates."""
    updates: OwnUpdates
    """What the optimizer updates, and its state."""
    owned: list[Owned]
    """What this rank owns of each parameter, in one sequence on all ranks."""
    hooks: Sequence[RemovableHandle] = ()
    """On the optimizer's steps."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, process_group: dist.ProcessGroup | None
    ) -> None:
        super().__init__(module, optimizer)
        require_elementwise(optimizer)
        refuse_shared_memory(module)
        is_alone = process_group is None or process_group.size() == 1
        self.group = None if is_alone else process_group
        self.device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))

    @property
    def idle_passes(self) -> int:
        """How many passes this rank has to run in this step after those of its micro-batches: one or none."""
        return 0

    def idle_pass(self) -> contextlib.AbstractContextManager[None]:
        """Run forward and backward of any micro-batch inside; its gradients do not count."""
        return contextlib.nullcontext()

    def whole_on_first(self, state: dict[str, Any]) -> dict[str, Any] | None:
        return whole_on_first(state, self.group)

    def own_state(self) -> dict[str, Any]:
        return self.updates.own_state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.updates.load_whole_state(state)

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()


def first_after_step(optimizer: torch.optim.Optimizer, hook: Callable[..., None]) -> RemovableHandle:
    """Call `hook` after each step of the optimizer, before all other such hooks: they see what it has made."""
    handle = optimizer.register_step_post_hook(hook)
    if (hooks := handle.hooks_dict_ref()) is not None:
        hooks.move_to_end(handle.id, last=False)
    return handle


def whole_on_first(state: dict[str, Any], group: dist.ProcessGroup | None) -> dict[str, Any] | None:
    """A state with a whole tensor, in host memory, for each CutTensor: on rank 0 of `group`, and None on the others.

    A collective; one tensor is gathered at a time.
    """
    cuts: dict[int, CutTensor] = {}
    replaced(state, lambda leaf, _: cuts.setdefault(id(leaf), leaf) if isinstance(leaf, CutTensor) else leaf)
    wholes = {key: _whole(cut, group) for key, cut in cuts.items()}
    if group is not None and group.rank():
        return None
    found: dict[str, Any] = replaced(state, lambda leaf, _: wholes[id(leaf)] if isinstance(leaf, CutTensor) else leaf)
    return found


def _whole(cut: CutTensor, group: dist.ProcessGroup | None) -> Tensor | None:
    """The whole tensor on rank 0, from all ranks' pieces; None on the others."""
    own = {start: values.detach().to("cpu", copy=True) for start, values in cut.pieces.items()}
    everyones: list[Any] = [own]
    if group is not None:
        everyones *= group.size()
        dist.gather_object(own, everyones if group.rank() == 0 else None, group=group, group_dst=0)
        if group.rank():
            return None
    return replace(cut, pieces=dict(ChainMap(*everyones))).whole()

"""Ranks that have all weights, and own a piece of each large parameter: they update it, and send it to all others."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_core.checkpoint import CutTensor
from ddp_core.reduction import ExactReduction
from ddp_core.reduction.agreement import refuse_unfit_shares, require_agreement
from ddp_core.reduction.communication import Channel, in_last_phase
from ddp_core.reduction.flat import Gradients, in_memory_order
from ddp_core.reduction.ordered_sum import groups_of
from ddp_core.reduction.parts import order_of

from .contiguous import THREADS, ContiguousPieces
from .owns_part import OwnsPart, first_after_step
from .parcels import GroupParcel
from .rounds import Rounds
from .shards import Shards, shard_groups
from .updates import OwnUpdates

_UNDER_WAY = 4
"""So many groups of gradients may be on their way at a time with strided shares."""


class OwnsPieces(OwnsPart):
    """Cuts the trained parameters of `module` into pieces, and lets `optimizer` update this rank's pieces.

        owned = OwnsPieces(model, optimizer, micro_batches=8, process_group=group)
        for index in owned.reduction.share:                    # an ExactReduction
            with owned.reduction.micro_batch(index):
                loss_sum(model(x[index]), y[index]).backward()
        owned.reduction.finish(scale=1 / samples)              # the `.grad` of this rank's pieces
        optimizer.step()                                       # then all ranks gather the parameters

    With contiguous shares a rank keeps whole gradients until its last backward of a step, and sends them in that one.
    With strided shares it sends them in every backward, which frees them. Ranks of one node add up among themselves
    before nodes exchange; `node` is that of `ExactReduction`. No DistributedDataParallel around the module.
    The parameters stay the same objects with the same values and strides, in new memory: do not move the module
    afterwards. The same on every rank. Raises UserError (2) for an optimizer that may not treat each element
    by itself and for parameters that share memory, and ValueError for ranks that do not agree.
    """

    reduction: ExactReduction

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        micro_batches: int,
        *,
        process_group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        shares: Literal["contiguous", "strided"] = "contiguous",
        node: str | int | None = None,
    ) -> None:
        super().__init__(module, optimizer, process_group)
        rank, world_size = (self.group.rank(), self.group.size()) if self.group is not None else (0, 1)
        gradients = Gradients(module)
        nodes: list[list[int]] = []
        if self.group is not None:
            kind = f"{shares}, in {len(shard_groups(gradients.parameters))} flat tensors"
            nodes = require_agreement(self.group, micro_batches, kind, gradients, node)
        refuse_unfit_shares(shares, micro_batches, world_size)
        groups = groups_of(nodes)
        self._shards = Shards(gradients.parameters, order_of(groups, world_size))
        is_strided = shares == "strided" and self.group is not None
        threads = None if is_strided or groups else THREADS
        self._channel = Channel(self.group, self.device, timeout, nodes, threads=threads)
        self.owned = self._shards.owned(rank, gradients.names)
        self._owned_by_id = dict(zip(map(id, gradients.parameters), self.owned, strict=True))
        # The last group first: backward makes its gradients first.
        parcels = [GroupParcel(group, self.owned, rank, gradients) for group in reversed(self._shards.groups)]
        given = (parcels, self.owned, gradients, self._channel, self.group)
        of_ranks = Rounds(*given, _UNDER_WAY) if is_strided else ContiguousPieces(*given)
        self.reduction = ExactReduction(module, micro_batches, process_group=self.group, shares=of_ranks)
        self.updates = OwnUpdates(optimizer, self._owned_by_id, self.group)
        self.hooks = [first_after_step(optimizer, lambda *_: self.gather_parameters())]

    def own_weights(self, copy: nn.Module | None = None) -> dict[str, Any]:
        state = super().own_weights(copy)
        cuts: dict[tuple[int, int], CutTensor] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            owned, value = self._owned_by_id.get(id(parameter)), state.get(name)
            if owned is None or not isinstance(value, Tensor) or value.shape != parameter.shape:
                continue
            key = (id(parameter), value.data_ptr())  # tied parameters have one memory
            if key not in cuts:
                own = None if owned.tensor is None else in_memory_order(value, parameter)[owned.start : owned.stop]
                cuts[key] = owned.cut_tensor(own, value.dtype)
            state[name] = cuts[key]
        return state

    def gather_parameters(self) -> None:
        """Bring all ranks' pieces of the parameters to every rank, and wait; a collective."""
        if self.group is None:
            return
        flats = [(group.flat, group.cuts) for group in self._shards.groups if group.flat.numel()]
        like = torch.empty(0, device=self.device)

        def gather() -> Tensor:
            self._channel.by_parts.gather(flats)
            return like

        self._channel.submit(in_last_phase(gather), like).wait()

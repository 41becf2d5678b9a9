"""One process per device, each of which keeps and updates its own part: no DistributedDataParallel around the model.

Gradients are sent while backward computes, each part of them to the rank that owns it. That rank alone updates this
part of the parameters, so only it has the optimizer's state for it; then all ranks gather the parameters.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ddp_core.reduction import ExactReduction, Shards
from ddp_core.sharding import ShardedOptimizer, require_elementwise
from ddp_core.trainers.distributed import DistributedTrainer


class ShardedTrainer(DistributedTrainer):
    """Computes this rank's share of every global batch, and updates this rank's pieces of the parameters.

    Raises UserError (2) for an optimizer that does not treat each element by itself.
    """

    def set_up(self) -> None:
        """Cut the parameters into pieces, and give this rank's to the reduction and to the optimizer."""
        layout, state = self.job.layout, self.state
        # Refused before there are threads and a process group that would have to be closed.
        require_elementwise(state.optimizer)
        self.module = self.model
        self.reduction = ExactReduction(
            self.model,
            self.cut.micro_batches,
            process_group=dist.group.WORLD,
            shares="strided" if layout.is_strided else "contiguous",
            node=self.job.collectives.world.node_rank,
            shards=Shards.of(self.model, layout.world_size),
        )
        state.optimizer.register_step_post_hook(self._update_made)
        state.sharded = ShardedOptimizer(state.optimizer, self.reduction)
        state.optimizer.register_step_post_hook(self._parameters_gathered)
        self.use_sharded_scaler()

    def use_sharded_scaler(self) -> None:
        """With fp16, see an overflow in the gradients of any rank."""
        state = self.state
        if state.scaler is not None:
            # Loads all of FSDP, which takes a second and is not needed without fp16.
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

            self.passes.scaler = state.scaler = ShardedGradScaler(self.device.type)
            state.optimizer.register_step_pre_hook(_as_fused_optimizers_read_it)

    def close(self) -> None:
        """Let go of the reduction, end its threads, drop what refers to the process group."""
        if self.state.sharded is not None:
            self.state.sharded.close()
        super().close()

    def _update_made(self, *_: Any) -> None:
        self.clock.lap("optimizer")

    def _parameters_gathered(self, *_: Any) -> None:
        self.clock.lap("exposed_communication")


def _as_fused_optimizers_read_it(optimizer: Any, *_: Any) -> None:
    """Make `found_inf` a single number, 0 or 1.

    ShardedGradScaler gives a tensor of shape [1] that counts the ranks whose gradients overflow. torch's fused
    optimizers subtract it from step counts of shape [], and leave an update out where it is 1, and exactly 1.
    """
    if (found := getattr(optimizer, "found_inf", None)) is not None:
        optimizer.found_inf = found.clamp(max=1.0).reshape(())

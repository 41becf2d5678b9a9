"""One process per device, each of which keeps its own part (`ddp_core.sharding`): no DistributedDataParallel.

Gradients are sent while backward computes, each part of them to the rank that owns it. That rank alone updates this
part of the parameters, so only it has the optimizer's state for it; then all ranks gather the parameters, at once or
where a forward needs them.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ddp_core.base.errors import UserError
from ddp_core.observe.step import StepBatch
from ddp_core.reduction.watching import describe_changes
from ddp_core.sharding import OwnsPart, Sharding
from ddp_core.trainers.distributed import DistributedStrategy


class ShardedStrategy(DistributedStrategy):
    """Computes this rank's share of every global batch, and updates this rank's part of the parameters.

    Raises UserError (2) for an optimizer that does not treat each element by itself, and for a model whose parameters
    cannot be cut where they are to be.
    """

    def set_up(self) -> None:
        state, group, sharding = self.state, dist.group.WORLD, Sharding.of(self.job.layout)
        assert group is not None
        self.module = self.model
        state.optimizer.register_step_post_hook(lambda *_: self.clock.lap("optimizer"))
        node = self.job.collectives.world.node_rank
        self.owned: OwnsPart = sharding.cut(self.model, state.optimizer, self.batches.cut.micro_batches, group, node)
        state.ownership, self.reduction = self.owned, self.owned.reduction
        self.reduction.compares_updates = False  # the run's guard does
        state.optimizer.register_step_post_hook(lambda *_: self.clock.lap("exposed_communication"))
        if state.scaler is not None:
            # Loads all of FSDP, which takes a second and is not needed without fp16.
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

            self.passes.scaler = state.scaler = ShardedGradScaler(self.job.device.type)
            state.optimizer.register_step_pre_hook(_as_fused_optimizers_read_it)

    def refuse_to_retrain(self, changes: dict[str, bool]) -> None:
        raise UserError(
            f"{self.where}: {describe_changes(changes)}, and --shard {self.job.layout.shard} has cut what was trained "
            "at first: set requires_grad in the model's function, once for the whole run, or leave --shard out"
        )

    def clip_gradients(self, max_norm: float) -> None:
        self.owned.reduction.clip_gradients_(max_norm)

    def join_last_round(self, batch: StepBatch) -> None:
        """Run the passes of other ranks' micro-batches along, where this rank has none: each gathers the parameters.

        Micro-batch 0 is run again for that; it does not count.
        """
        for _ in range(self.owned.idle_passes):
            first = self.batches.cut.share(0, batch.samples)[0]
            inputs, targets = self.batches.fetch(batch, first)
            self.seeds(batch.step, first.index)
            with self.owned.idle_pass():
                loss = self.passes.loss(self.module, inputs, targets)
                self.passes.backward(loss, self.passes.loss_weight(batch.divisor))

    def close(self) -> None:
        self.owned.close()
        del self.owned
        super().close()


def _as_fused_optimizers_read_it(optimizer: Any, *_: Any) -> None:
    """Make `found_inf` a single number, 0 or 1.

    ShardedGradScaler gives a tensor of shape [1] that counts the ranks whose gradients overflow. torch's fused
    optimizers subtract it from step counts of shape [], and leave an update out where it is 1, and exactly 1.
    """
    if (found := getattr(optimizer, "found_inf", None)) is not None:
        optimizer.found_inf = found.clamp(max=1.0).reshape(())

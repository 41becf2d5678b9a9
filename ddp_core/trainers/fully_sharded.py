"""One process per device, each of which keeps its own part of the parameters, too: blocks are gathered for use.

This file loads torch's FSDP, which takes a second, so only `build_trainer` imports it, where it is needed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ddp_core.observe.step import StepBatch
from ddp_core.reduction import ExactReduction
from ddp_core.sharding.fully_sharded import FullySharded
from ddp_core.sharding.plain_rounds import PlainRounds
from ddp_core.trainers.sharded import ShardedTrainer


class FullyShardedTrainer(ShardedTrainer):
    """Computes this rank's share of every global batch, and updates this rank's rows of the parameters.

    Raises UserError (2) for a model that torch's fully_shard cannot wrap, and for an optimizer that does not treat each
    element by itself.
    """

    def set_up(self) -> None:
        """Cut the parameters between rows, and give this rank's to the reduction and to the optimizer."""
        state, group, micro_batches = self.state, dist.group.WORLD, self.cut.micro_batches
        assert group is not None
        self.module = self.model
        sharded = FullySharded(self.model, state.optimizer, micro_batches, process_group=group, exact=self.exact)
        state.sharded = state.fully_sharded = sharded
        if isinstance(sharded.rounds, PlainRounds):
            self.reduction = sharded.rounds
        else:
            self.reduction = ExactReduction(self.model, micro_batches, process_group=group, shares=sharded.rounds)
        self.use_sharded_scaler()

    def compute_gradients(self, batch: StepBatch) -> None:
        """Forward and backward of this rank's micro-batches; each backward also sends gradients."""
        # DistributedDataParallel does so in the first forward of each step, and fully_shard does not.
        self.settle_buffers()
        super().compute_gradients(batch)

    def join_last_round(self, batch: StepBatch) -> None:
        """Run the passes of other ranks' micro-batches along, where this rank has none: each gathers the parameters.

        Micro-batch 0 is run again for that; it does not count.
        """
        assert self.state.fully_sharded is not None
        rounds = self.state.fully_sharded.rounds
        for _ in range(rounds.idle_passes):
            first = self.cut.share(0, batch.samples)[0]
            inputs, targets = self.batches.loader.fetch(batch.epoch, self.batches.ids(batch.step, first))
            self.seed_micro_batch(batch.step, first.index)
            with rounds.idle_pass():
                loss = self.passes.loss(self.module, inputs, targets)
                weight = self.passes.loss_weight(batch.samples)
                # Torch's own sums take in every gradient that there is.
                self.passes.backward(loss, weight if self.exact else torch.zeros_like(weight))

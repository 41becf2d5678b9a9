"""One process per device, each of which keeps its own part (`ddp_core.sharding`): no DistributedDataParallel.

Gradients are sent while backward computes, each part of them to the rank that owns it. That rank alone updates this
part of the parameters, so only it has the optimizer's state for it; then all ranks gather the parameters, at once or
where a forward needs them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ddp_core.base.errors import UserError
from ddp_core.base.memory import free_on
from ddp_core.observe.step import StepBatch
from ddp_core.reduction.refusal import DependsOnLayout
from ddp_core.reduction.trained import TrainedParameters, describe_changes
from ddp_core.reduction.written_parameters import WrittenParameters
from ddp_core.sharding import OwnsPart, Sharding
from ddp_core.trainers.distributed import DistributedTrainer
from ddp_core.trainers.repeats import Computed

_COPIES = 4
"""Of all weights must fit into the free memory: a gradient, and as much again for what forward keeps, with a margin."""


class ShardedTrainer(DistributedTrainer):
    """Computes this rank's share of every global batch, and updates this rank's part of the parameters.

    Raises UserError (2) for an optimizer that does not treat each element by itself, and for a model whose parameters
    cannot be cut where they are to be.
    """

    def set_up(self) -> None:
        """Cut the state, and let this rank's optimizer update what it owns."""
        state, group, sharding = self.state, dist.group.WORLD, Sharding.of(self.job.layout)
        assert group is not None
        self.module = self.model
        whole = self.pass_before_the_cut()
        state.optimizer.register_step_post_hook(lambda *_: self.clock.lap("optimizer"))
        node = self.job.collectives.world.node_rank
        self.owned: OwnsPart = sharding.cut(
            self.model, state.optimizer, self.cut.micro_batches, group, self.exact, node
        )
        # The parameters are other objects where each rank has a part of them.
        self.trained = TrainedParameters(self.model)
        state.ownership, self.reduction = self.owned, self.owned.reduction
        state.optimizer.register_step_post_hook(lambda *_: self.clock.lap("exposed_communication"))
        if state.scaler is not None:
            # Loads all of FSDP, which takes a second and is not needed without fp16.
            from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

            self.passes.scaler = state.scaler = ShardedGradScaler(self.device.type)
            state.optimizer.register_step_pre_hook(_as_fused_optimizers_read_it)
        if whole is not None:
            with self.guard.check("before and after the cut", 0):
                try:
                    now = self.computed(0, 0)
                except DependsOnLayout as error:
                    raise UserError(f"{self.where}: {error}") from None
                self.require_same_pass(whole, now)

    @property
    def can_compare(self) -> bool:
        """Whether a pass before the cut can be compared with one after it, the same on every rank."""
        if self.checks.cross_check is None:
            return False
        weights = sum(each.numel() * each.element_size() for each in self.model.parameters())
        has_room = free_on(self.device) > _COPIES * weights
        if not all(self.job.collectives.gather(has_room)):
            self.guard.figures["not compared before and after the cut"] = "not enough memory for a whole gradient"
            return False
        return True

    def pass_before_the_cut(self) -> Computed | None:
        """What the first micro-batch gives; None where it raises or writes to weights, or is not compared."""
        if not self.can_compare:
            return None
        try:
            self.model.train()
            written = WrittenParameters(self.model)
            found: Computed | None = self.computed(0, 0)
            written.refuse_changes(is_last=True)
            if written.written:
                found = None  # the pass after the cut would begin with other weights; training refuses what does harm
        except Exception:  # training meets it, too, and says in which step
            found = None
        return found if None not in self.job.collectives.gather(found) else None

    def require_same_pass(self, whole: Computed, now: Computed) -> None:
        """Raise UserError (2), on every rank, where the model computes something else since its state is cut."""
        found = next(filter(None, self.job.collectives.gather(whole.difference(now))), None)
        if found is not None:
            raise UserError(
                f"{found} has other bits since --shard {self.job.layout.shard} has cut the model: the model asks "
                "whether it is cut, or a hook or a closure leads to parameters that were replaced; leave --shard out, "
                "or use one that cuts less"
            )

    def compute_gradients(self, batch: StepBatch) -> None:
        """Forward and backward of this rank's micro-batches, in which it also sends gradients."""
        # DistributedDataParallel does so in the first forward of each step.
        self.settle_buffers()
        super().compute_gradients(batch)

    def refuse_to_retrain(self, changes: dict[str, bool]) -> None:
        raise UserError(
            f"{self.where}: {describe_changes(changes)}, and --shard {self.job.layout.shard} has cut what was trained "
            "at first: set requires_grad in the model's function, once for the whole run, or leave --shard out"
        )

    def join_last_round(self, batch: StepBatch) -> None:
        """Run the passes of other ranks' micro-batches along, where this rank has none: each gathers the parameters.

        Micro-batch 0 is run again for that; it does not count.
        """
        for _ in range(self.owned.idle_passes):
            first = self.cut.share(0, batch.samples)[0]
            ids, key = self.batches.ids(batch.step, first), self.batches.key(batch.step, first)
            inputs, targets = self.batches.loader.fetch(batch.epoch, ids, key)
            self.seed_micro_batch(batch.step, first.index)
            with self.owned.idle_pass():
                loss = self.passes.loss(self.module, inputs, targets)
                weight = self.passes.loss_weight(batch.samples)
                # Torch's own sums take in every gradient that there is.
                self.passes.backward(loss, weight if self.exact else torch.zeros_like(weight))

    def close(self) -> None:
        """Let go of the optimizer and the reduction, end its threads, drop what refers to the process group."""
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

"""One process per device, with DistributedDataParallel around the model: it sends gradients during backward.

With a CUDA graph the model stands alone, since hooks within a recorded backward could not send: the exact reduction
then sends all gradients after it, and nothing hides the time that this takes.
"""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_core.observe.step import StepBatch
from ddp_core.reduction import ExactReduction
from ddp_core.reduction.plain import PlainReduction
from ddp_core.trainers.strategy import SingleStrategy


class DistributedStrategy(SingleStrategy):
    """Computes this rank's share of every global batch."""

    sends_in_backward = True
    _is_set_up = False

    def set_up(self) -> None:
        node, micro_batches = self.job.collectives.world.node_rank, self.batches.cut.micro_batches
        if self.job.options.cuda_graph:
            self.module, group = self.model, dist.group.WORLD
        else:
            self.module, group = self.wrapped(), None
        self.reduction = ExactReduction(
            self.module,
            micro_batches,
            process_group=group,
            shares=self.batches.cut.dealt or "contiguous",
            node=node,
            before_reading=self.losses.await_device,
        )
        self.reduction.compares_updates = False  # the run's guard does
        self.job.collectives.when_left_behind(self.reduction.give_up)
        self._is_set_up = True

    def retrain(self) -> None:
        with self.job.collectives.connecting(self.job.collectives.uses_nccl):
            super().retrain()

    def settle_buffers(self) -> None:
        """Take rank 0's buffers, as DDP's next forward would: in plain mode, each rank changes its own only.

        So do those of the averaged weights, which each rank averages from its own.
        """
        if not self.job.is_exact and self.job.experiment.ddp.broadcast_buffers:
            averaged = () if self.state.average is None else self.state.average.module.buffers()
            for buffer in (*self.model.buffers(), *averaged):
                sent = buffer.detach().contiguous()
                dist.broadcast(sent, src=0)
                buffer.detach().copy_(sent)

    def close(self) -> None:
        """End the communication threads, then drop DDP: its reducer must be gone before the process group is."""
        with self.job.collectives.connecting(self.job.collectives.uses_nccl):
            self.reduction.close(waits=self.job.collectives.waits_to_part)
            del self.reduction, self.module
            gc.collect()

    def wrapped(self) -> DistributedDataParallel:
        """The model in DistributedDataParallel, with the experiment's settings for it."""
        settings = self.job.experiment.ddp
        return DistributedDataParallel(
            self.model,
            device_ids=[self.job.device] if self.job.device.type == "cuda" else None,
            bucket_cap_mb=settings.bucket_cap_mb,
            gradient_as_bucket_view=settings.gradient_as_bucket_view,
            static_graph=settings.static_graph,
            find_unused_parameters=settings.find_unused_parameters,
            # The exact reduction carries batch-norm statistics itself.
            broadcast_buffers=settings.broadcast_buffers and not self.job.is_exact,
            # Later the ranks have the same weights, which no message may spoil that a lost rank never sends.
            init_sync=not (self.job.is_exact and self._is_set_up),
        )


class PlainDistributedStrategy(DistributedStrategy):
    """With DistributedDataParallel's own sums, or those of one of torch's communication hooks."""

    def set_up(self) -> None:
        settings, self.module = self.job.experiment.ddp, self.wrapped()
        self.reduction = PlainReduction(self.module, self.batches.cut.micro_batches)
        self.loss_copies = self.job.layout.world_size
        hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
        if settings.communication_hook == "powersgd":
            state = powerSGD_hook.PowerSGDState(None, settings.powersgd_rank, start_powerSGD_iter=10)
            self.module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif settings.communication_hook in hooks:
            self.module.register_comm_hook(None, hooks[settings.communication_hook])

    def join_empty_handed(self, batch: StepBatch) -> None:
        """Run the backward of one sample with a loss weight of 0: DDP's all-reduce runs in a backward only.

        The forward before it takes part in the broadcast of the buffers; in eval mode it does not change them.
        """
        self.module.eval()
        inputs, targets = self.batches.loader.fetch(0, self.batches.order.ids(0, 0, 1))
        loss = self.passes.loss(self.module, inputs, targets)
        self.send_losses(batch)
        self.passes.backward(loss, torch.zeros((), device=self.job.device))
        self.module.train()

"""Which part of a training each rank keeps, as one object: it refuses, cuts, and says what lies where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from ddp_core.base.errors import UserError
from ddp_core.config.experiment import DdpOptions, Experiment
from ddp_core.config.layout import Layout, ShardMode

if TYPE_CHECKING:
    from .owns_part import OwnsPart


@dataclass(frozen=True)
class Sharding:
    """What each rank keeps a part of: nothing, the optimizer's state, also gradients, or also parameters."""

    mode: ShardMode = "none"

    @classmethod
    def of(cls, layout: Layout) -> Sharding:
        """The sharding of a layout."""
        return cls(layout.shard)

    @property
    def is_any(self) -> bool:
        """Whether anything is cut. Optimizer state is then, in every mode."""
        return self.mode != "none"

    @property
    def cuts_gradients(self) -> bool:
        """Whether each rank keeps a part of the gradients alone: shares are then strided."""
        return self.mode in ("gradients", "parameters")

    @property
    def cuts_parameters(self) -> bool:
        """Whether each rank keeps a part of the parameters alone."""
        return self.mode == "parameters"

    def check(self, experiment: Experiment, is_plain: bool, inexact_because: str | None, cuda_graph: bool) -> None:
        """Raise UserError (2) where this mode cannot be had for a request.

        `is_plain`: plain sums are asked for; `inexact_because`: why the exact reduction cannot be had.
        """
        option = f"--shard {self.mode}"
        if not self.is_any:
            return
        usual = DdpOptions()
        for name in ("static_graph", "communication_hook"):
            if getattr(experiment.ddp, name) != getattr(usual, name):
                raise UserError(
                    f"{option}: it does without DistributedDataParallel, so that the setting ddp.{name} would change "
                    "nothing; leave --shard out"
                )
        if experiment.sync_batch_norm:
            raise UserError(
                f"{option}: sync_batch_norm is for the plain sums of DistributedDataParallel, and it does without "
                "that; leave --shard out"
            )
        if self.cuts_parameters and experiment.ema_decay is not None:
            raise UserError(
                f"{option}: ema_decay keeps an average of whole weights on every rank, and no rank has whole weights; "
                "use --shard gradients, or leave it out"
            )
        if self.cuts_parameters and experiment.memory_format != "contiguous":
            raise UserError(
                f"{option}: parameters are cut between rows, which do not lie together with memory_format "
                f"{experiment.memory_format}; use --shard gradients, or leave it out"
            )
        if inexact_because is not None:
            raise UserError(
                f"{option} needs the exact reduction, which cannot be had here: {inexact_because}; leave --shard out"
            )
        if is_plain:
            raise UserError(
                f"{option} needs the exact reduction: plain sums are those of DistributedDataParallel, which gives all "
                "gradients to every rank; use --reduction exact, or leave --shard out"
            )
        if cuda_graph:
            raise UserError(
                f"--cuda-graph: {option} sends gradients from within backward, which no graph holds; leave one of them "
                "out"
            )

    def check_parts(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Raise UserError (2) where the optimizer or the parameters cannot be cut; `cut` would, too."""
        if self.is_any:
            from .shards import refuse_shared_memory
            from .updates import require_elementwise

            require_elementwise(optimizer)
            refuse_shared_memory(module)
        if self.cuts_parameters:
            from .blocks import refuse_unsuitable

            refuse_unsuitable(module)

    def cut(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        micro_batches: int,
        process_group: dist.ProcessGroup,
        node: int | None = None,
    ) -> OwnsPart:
        """Let this rank, which is on node `node`, keep its part; the result has the reduction, and all ranks' state.

        `gradients` is not `parameters` with weights that are kept: it takes what fully_shard refuses (averaged weights,
        channels_last, single numbers, blocks whose parameters are used without a call), and shares the memory of the
        parameters with their pieces. Both send in the same rounds.
        """
        if self.cuts_parameters:
            # Loads torch's FSDP, which takes a second.
            from .rows import OwnsRows

            return OwnsRows(module, optimizer, micro_batches, process_group=process_group, node=node)
        from .pieces import OwnsPieces

        return OwnsPieces(
            module,
            optimizer,
            micro_batches,
            process_group=process_group,
            shares="strided" if self.cuts_gradients else "contiguous",
            node=node,
        )

"""Where an experiment runs: one frozen record."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ddp_core.base.errors import UserError
from ddp_core.config.records import Frozen

LayoutKind = Literal["single", "dp", "ddp"]
DeviceType = Literal["cpu", "cuda"]
ShardMode = Literal["none", "optimizer", "gradients", "parameters"]
"""What each rank of `ddp` keeps only its own part of: nothing, the optimizer's state, gradients too, parameters too."""

Dealt = tuple[Annotated[int, Field(gt=0)], ...] | Literal["auto"] | None
"""How many parts of each step each rank computes, as (3, 1); None: equal ones; auto: by its measured speed."""

SHARD_MODES: tuple[ShardMode, ...] = ("optimizer", "gradients", "parameters")
"""The modes that shard anything."""


class Layout(Frozen):
    """`single`, `dp` or `ddp` on a device type, nnodes x nproc_per_node. Nothing in it may change the mathematics.

    For `dp`, one process drives `nproc_per_node` replicas from threads. `shard` is for `ddp` alone.
    """

    kind: LayoutKind = "single"
    device: DeviceType = "cpu"
    nnodes: int = Field(default=1, gt=0)
    nproc_per_node: int = Field(default=1, gt=0)
    shard: ShardMode = "none"
    dealt: Dealt = None

    @property
    def shares(self) -> int:
        """The number of shares of each global batch: one for each rank of `ddp`, or each replica of `dp`."""
        return self.nnodes * self.nproc_per_node

    @property
    def world_size(self) -> int:
        """Number of training processes."""
        return self.shares if self.kind == "ddp" else 1

    @property
    def saves_in_parts(self) -> bool:
        """Whether each rank writes its part of every checkpoint."""
        return self.shard != "none" and self.world_size > 1

    @property
    def label(self) -> str:
        """A short name for directories and tables: single-cpu, dp-2-cpu, ddp-2x2-cpu, ddp-1x2-cpu-shard-optimizer."""
        if self.kind == "single":
            return f"single-{self.device}"
        if self.kind == "dp":
            return f"dp-{self.nproc_per_node}-{self.device}"
        sharded = "" if self.shard == "none" else f"-shard-{self.shard}"
        dealt = f"-shares-{'auto' if self.dealt == 'auto' else 'uneven'}" if self.dealt else ""
        return f"ddp-{self.nnodes}x{self.nproc_per_node}-{self.device}{sharded}{dealt}"

    @property
    def description(self) -> str:
        """The label, and for dp on the CPU that its replicas are CPU threads that do what nn.DataParallel does."""
        simulated = self.kind == "dp" and self.device == "cpu"
        return f"{self.label} (nn.DataParallel's moves over CPU threads)" if simulated else self.label

    def check(self) -> None:
        """Raises UserError where kind, counts and shard mode contradict each other."""
        if self.kind == "single" and self.shares > 1:
            raise UserError(
                f"layout single is one process on one device, not {self.nnodes} x {self.nproc_per_node}; "
                "use --layout ddp (or dp on one node)"
            )
        if self.kind == "dp" and self.nnodes > 1:
            raise UserError(
                f"layout dp runs on one node, not on {self.nnodes}; use --layout ddp --nnodes {self.nnodes}"
            )
        if self.shard != "none" and self.kind != "ddp":
            raise UserError(
                f"--shard {self.shard} divides work among ranks, and layout {self.kind} is one process; "
                "use --layout ddp, or leave --shard out"
            )
        if self.dealt and self.kind != "ddp":
            raise UserError(f"--shares is for the ranks of --layout ddp, not for {self.kind}: leave it out")
        if self.dealt and self.shard != "none":
            raise UserError(
                f"--shares is for ranks that each have the whole state: leave it out, or --shard {self.shard}"
            )
        if isinstance(self.dealt, tuple) and len(self.dealt) != self.world_size:
            raise UserError(
                f"--shares {','.join(map(str, self.dealt))} has {len(self.dealt)} numbers for {self.world_size} ranks: "
                "give one for each rank, in the order of the ranks"
            )

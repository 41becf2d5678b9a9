"""Where an experiment runs: one frozen record, and the cut of the global batch that follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from ddp_core.errors import UserError
from ddp_core.experiment import Experiment, Frozen, nearest_multiples


class Layout(Frozen):
    """`single`, `dp` or `ddp` on a device type, nnodes x nproc_per_node. Nothing in it may change the mathematics.

    For `dp`, one process drives `nproc_per_node` replicas from threads.
    """

    kind: Literal["single", "dp", "ddp"] = "single"
    device: Literal["cpu", "cuda"] = "cpu"
    nnodes: int = Field(1, gt=0)
    nproc_per_node: int = Field(1, gt=0)

    @property
    def shares(self) -> int:
        """How many take a share of each global batch: ranks of `ddp`, replicas of `dp`."""
        return self.nnodes * self.nproc_per_node

    @property
    def world_size(self) -> int:
        """Number of training processes."""
        return self.shares if self.kind == "ddp" else 1

    @property
    def label(self) -> str:
        """A short name for directories and tables: single-cpu, dp-2-cpu, ddp-2x2-cpu."""
        if self.kind == "single":
            return f"single-{self.device}"
        if self.kind == "dp":
            return f"dp-{self.nproc_per_node}-{self.device}"
        return f"ddp-{self.nnodes}x{self.nproc_per_node}-{self.device}"

    @property
    def description(self) -> str:
        """The label with what a reader must know: that DP on CPU is nn.DataParallel's five moves over threads."""
        simulated = self.kind == "dp" and self.device == "cpu"
        return f"{self.label} (nn.DataParallel's moves over CPU threads)" if simulated else self.label

    def check(self) -> None:
        """Raises UserError where kind and counts contradict each other."""
        if self.kind == "single" and self.shares > 1:
            raise UserError(
                f"layout single is one process on one device, not {self.nnodes} x {self.nproc_per_node}; "
                "use --layout ddp (or dp on one node)"
            )
        if self.kind == "dp" and self.nnodes > 1:
            raise UserError(
                f"layout dp runs on one node, not on {self.nnodes}; use --layout ddp --nnodes {self.nnodes}"
            )


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward: `index` in the step's canonical order, samples [start, stop) of the global batch."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class BatchCut:
    """How a global batch falls into micro-batches and these into contiguous shares, one per rank or replica.

    The micro-batches depend on the experiment alone whenever it names `micro_batch`.
    """

    global_batch_size: int
    micro_batch: int
    shares: int

    @classmethod
    def of(cls, experiment: Experiment, layout: Layout) -> BatchCut:
        """The cut for a layout. Raises UserError, naming the nearest sizes that work, where it cannot be made."""
        size, shares = experiment.global_batch_size, layout.shares
        whose = "replicas" if layout.kind == "dp" else "ranks"
        if experiment.micro_batch is None:
            if size % shares:
                below, above = nearest_multiples(size, shares)
                choice = " or ".join(str(number) for number in (below, above) if number)
                raise UserError(
                    f"global_batch_size {size} does not divide among {shares} {whose}; "
                    f"the nearest sizes that do: {choice} "
                    f"(--set global_batch_size={above})"
                )
            return cls(size, size // shares, shares)
        cut = cls(size, experiment.micro_batch, shares)
        if shares > cut.micro_batches:
            needed = experiment.micro_batch * shares
            raise UserError(
                f"{shares} {whose} but only {cut.micro_batches} micro-batches of {experiment.micro_batch} "
                f"in a global batch of {size}: "
                f"use at most {cut.micro_batches} {whose}, or --set global_batch_size={needed}"
            )
        return cut

    @property
    def micro_batches(self) -> int:
        """M, the number of micro-batches of a whole global batch."""
        return self.count(self.global_batch_size)

    @property
    def accumulation_steps(self) -> int:
        """The most micro-batches that one rank or replica computes in one step."""
        return -(-self.micro_batches // self.shares)

    def count(self, samples: int) -> int:
        """Micro-batches of a step with `samples` samples (fewer than the global batch in an incomplete last one)."""
        return -(-samples // self.micro_batch)

    def share(self, index: int, samples: int) -> list[MicroBatch]:
        """What rank or replica `index` computes of a step with `samples` samples: a contiguous range, empty where
        there is nothing left.
        """
        count = self.count(samples)
        first, stop = index * count // self.shares, (index + 1) * count // self.shares
        return [
            MicroBatch(number, number * self.micro_batch, min((number + 1) * self.micro_batch, samples))
            for number in range(first, stop)
        ]

    def describe(self) -> str:
        """The batch arithmetic in one line, printed at the start of a run."""
        return (
            f"global batch {self.global_batch_size} = {self.micro_batches} micro-batches x {self.micro_batch} samples, "
            f"{self.accumulation_steps} per step on each of {self.shares}"
        )

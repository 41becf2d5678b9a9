"""How a global batch is cut into micro-batches, and which rank or replica computes which of them."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_core.base.errors import UserError
from ddp_core.base.seeds import share_of
from ddp_core.config.experiment import Experiment, nearest_multiples
from ddp_core.config.layout import Layout


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward and backward: [start, stop) of the global batch, as micro-batch `index`."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True)
class BatchCut:
    """How a global batch is cut into micro-batches, and these into shares, one per rank or replica.

    Where the experiment sets `micro_batch`, the micro-batches depend on the experiment alone.
    """

    global_batch_size: int
    micro_batch: int
    shares: int
    is_strided: bool = False
    """Whether W ranks take micro-batches in turns: rank r computes r, r + W, r + 2W, … Otherwise neighbouring ones.

    Where gradients are sharded, ranks exchange them after each backward; the gradients that meet are then those of W
    neighbouring micro-batches, which can be added up at once.
    """
    dealt: tuple[int, ...] | None = None
    """In which proportion a step is dealt to the ranks, as (3, 1); None: in equal shares."""

    @classmethod
    def of(cls, experiment: Experiment, layout: Layout) -> BatchCut:
        """The cut for a layout. Raises UserError, naming the nearest sizes that work, where it cannot be made."""
        size, shares = experiment.global_batch_size, layout.shares
        is_strided = layout.shard in ("gradients", "parameters")
        whose = "replicas" if layout.kind == "dp" else "ranks"
        if experiment.micro_batch is None:
            if size % shares:
                below, above = nearest_multiples(size, shares)
                choice = " or ".join(str(number) for number in (below, above) if number)
                raise UserError(
                    f"global_batch_size {size} does not divide among {shares} {whose}; "
                    f"the nearest sizes that do: {choice} (--set global_batch_size={above})"
                )
            return cls(size, size // shares, shares, is_strided)
        cut = cls(
            size, experiment.micro_batch, shares, is_strided, layout.dealt if isinstance(layout.dealt, tuple) else None
        )
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
        return max(self.counts)

    @property
    def counts(self) -> tuple[int, ...]:
        """How many micro-batches of a whole global batch each rank or replica computes."""
        return tuple(len(self._numbers(index, self.micro_batches)) for index in range(self.shares))

    def count(self, samples: int) -> int:
        """The number of micro-batches in a step of `samples` samples; an incomplete last batch has fewer."""
        return -(-samples // self.micro_batch)

    def parts(self, samples: int) -> list[MicroBatch]:
        """The micro-batches of a step of `samples` samples, in order."""
        return [
            MicroBatch(index, start, min(start + self.micro_batch, samples))
            for index, start in enumerate(range(0, samples, self.micro_batch))
        ]

    def share(self, index: int, samples: int) -> list[MicroBatch]:
        """The micro-batches of rank or replica `index` in a step of `samples` samples, in order; perhaps none."""
        parts = self.parts(samples)
        return [parts[number] for number in self._numbers(index, len(parts))]

    def _numbers(self, index: int, count: int) -> range:
        """Which of `count` micro-batches rank or replica `index` computes."""
        if self.is_strided:
            return range(index, count, self.shares)
        return share_of(count, index, self.dealt or self.shares)

    def describe(self) -> str:
        """The batch arithmetic in one line, printed at the start of a run."""
        each = (
            f"{' + '.join(map(str, self.counts))} per step on the ranks"
            if self.dealt
            else f"{self.accumulation_steps} per step on each of {self.shares}"
        )
        return (
            f"global batch {self.global_batch_size} = {self.micro_batches} micro-batches x {self.micro_batch} samples, "
            f"{each}{', in turns' if self.is_strided else ''}"
        )

"""Gradients that are the same bits on one process and on any number of ranks."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .agreement import (
    refuse_inexact,
    refuse_unfit_shares,
    require_agreement,
    require_equal_scale,
    require_equal_weights,
    warn_of_threads,
)
from .batch_statistics import BatchStatistics
from .communication import Channel
from .contiguous import ContiguousShares
from .flat import Gradients, scale_gradients_
from .norm import clip_gradients_, gradient_norm
from .strided import StridedShares
from .watching import ForeignBuffers, TrainedParameters, WrittenParameters


class Shares(Protocol):
    """How the micro-batches of a step are dealt to the ranks, and how their gradients come together again."""

    def share(self, micro_batches: int) -> range:
        """The micro-batches of a step that this rank computes, in order."""

    def begin(self, micro_batches: int) -> None:
        """Start a step."""

    def backward(self, index: int) -> contextlib.AbstractContextManager[None]:
        """Run forward and backward of micro-batch `index` inside."""

    def push(self, statistics: Tensor) -> None:
        """Take the gradients of the micro-batch that was run, and its batch-norm statistics."""

    def finish(self, statistics: Tensor) -> None:
        """Set `statistics`, and every `.grad`, to the sum over all micro-batches."""

    def close(self) -> None:
        """Leave DDP or the parameters as they were."""


class OwnShares(Shares, Protocol):
    """Shares where each rank owns a part of the parameters, and `finish` gives it the sums of this part alone.

    Made beside the reduction, by what cuts the parameters (`ddp_core.sharding`).
    """

    gradients: Gradients
    """What each backward makes."""
    reduced: Sequence[nn.Parameter]
    """What `finish` gives a `.grad`."""
    channel: Channel
    """What carries gradients to other ranks; `ExactReduction.close` closes it."""
    weights_to_compare: dist.ProcessGroup | None
    """The ranks that compare their weights in the first step; None where that is done already."""

    def norm(self) -> Tensor:
        """The norm of the whole gradient, as `gradient_norm` has it; a collective."""


class ExactReduction(contextlib.AbstractContextManager["ExactReduction"]):
    """Sums the gradients of `micro_batches` micro-batches in the canonical tree, on one process or many.

    `module` is a DistributedDataParallel (a communication hook is registered once and for all, and the exchange
    overlaps with the last backward; not with `static_graph` or `find_unused_parameters`), a plain module with
    `process_group` (one blocking exchange at the end), or a plain module alone. A step:

        for index in exact.share:
            with exact.micro_batch(index):
                loss_sum(module(x[index]), y[index]).backward()    # once, a sum over samples
        exact.finish(scale=1 / samples)                           # every p.grad: the sum times scale
        optimizer.step()

    With `shares="contiguous"` a rank computes neighbouring micro-batches. With `shares="strided"` rank r of W computes
    r, r + W, r + 2W, …, as the loaders of other libraries deal them; ranks then exchange gradients after every
    backward, in the background. With `shares=(3, 1)`, one number for each rank, a faster rank computes more of the
    neighbouring ones. All have the same bits. Ranks of one node add up among themselves before nodes
    exchange; `node` names this rank's node (None: by the name of its host). `before_reading` is called before the host
    reads parameters from the device: for a wait that watches for lost peers, which the reading itself does not.

    A micro-batch in which a parameter gets no gradient adds nothing to it; without one in any it keeps `grad=None`
    (DDP needs `find_unused_parameters=True` for both where that begins after the first step, unless shares are
    strided). Batch-norm statistics: see BatchStatistics. `begin` starts a step with another number of micro-batches.
    `close` (or `with ExactReduction(...) as exact`) ends the threads and their process group; call it before the DDP
    module is dropped, and drop that (`gc.collect()`) before `destroy_process_group()`.

    Where each rank owns a part of the parameters, `shares` are those of `ddp_core.sharding`: `finish` then gives a
    `.grad` to what this rank's optimizer updates, and to nothing else.

    In a loop that is not your own: call `begin()` before the first forward of a step, put each backward into
    `micro_batch(exact.remaining[0])`, and call `finish` as soon as `remaining` is empty, before gradients are clipped
    or used. With strided shares the forward may be run outside of `micro_batch`. A loss is often a mean over the
    micro-batch, not a sum: `scale=1 / micro_batches` makes the mean of the means. A loss that is divided by the number
    of a rank's micro-batches has other bits on each layout; undo that before backward.

    Raises ValueError for what cannot be exact: more ranks than micro-batches, `broadcast_buffers=True` with
    buffers, SyncBatchNorm, DDP's mixed precision or ignored parameters, complex parameters on several ranks, sparse
    gradients, in any step a buffer that forward changes, a parameter that forward changes otherwise in each
    micro-batch, parameters whose `requires_grad` is another than when the reduction was made, and ranks that do not
    agree (on the numbers of threads and micro-batches, parameters, torch; in each step on `scale`, unless each owns a
    part of the parameters; before the first step and after steps 1, 2, 4, 8 … on the weights). Warns where torch chose
    the number of threads itself, since another number has other bits.
    """

    def __init__(
        self,
        module: nn.Module,
        micro_batches: int,
        *,
        process_group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        shares: Literal["contiguous", "strided"] | tuple[int, ...] | OwnShares = "contiguous",
        node: str | int | None = None,
        before_reading: Callable[[], None] = lambda: None,
    ) -> None:
        shares = tuple(shares) if isinstance(shares, list) else shares
        own = None if isinstance(shares, str | tuple) else shares
        self.module = module
        ddp = module if isinstance(module, DistributedDataParallel) else None
        group: dist.ProcessGroup | None = process_group
        if ddp is not None:
            refuse_inexact(ddp)
            group = ddp.process_group
        self.micro_batches = micro_batches
        self.share: range
        """The micro-batches that this rank computes in the step at hand (else in a full one), in order."""
        rank, world_size = (group.rank(), group.size()) if group is not None else (0, 1)
        if rank == 0:
            warn_of_threads()
        self._statistics = BatchStatistics(module)
        inner = self._inner = module if ddp is None else ddp.module
        self._foreign, self._trained = ForeignBuffers(inner), TrainedParameters(inner)
        self._written = WrittenParameters(inner, before_reading=before_reading)
        self._steps = 0
        # Whether a step has begun, and how many micro-batches of it this rank has run.
        self._has_begun, self._run = False, 0
        self._shares: Shares
        self._own = own
        self.compares_updates = True
        """Whether ranks compare the scale in each step, and their weights also after steps 1, 2, 4, 8 …"""
        if own is not None:
            refuse_unfit_shares("contiguous", micro_batches, world_size)
            self._shares, self._gradients, self._channel = own, own.gradients, own.channel
            self._reduced, self._to_compare = own.reduced, own.weights_to_compare
            self._full_share = self.share = own.share(micro_batches)
            return
        self._gradients = Gradients(module.named_parameters())
        self._reduced = self._gradients.parameters
        self._to_compare = group if world_size > 1 else None
        nodes: list[list[int]] | None = None
        if self._to_compare is not None:
            nodes = require_agreement(self._to_compare, micro_batches, str(shares), self._gradients, node)
        refuse_unfit_shares(shares, micro_batches, world_size)  # which all ranks do, as they agree
        device = next((parameter.device for parameter in self._gradients.parameters), torch.device("cpu"))
        parts = shares if isinstance(shares, tuple) else ()
        self._channel = Channel(group, device, timeout, nodes, parts)
        kind = StridedShares if shares == "strided" and world_size > 1 else ContiguousShares
        self._shares = kind(ddp, self._gradients, self._channel)
        self._full_share = self.share = self._shares.share(micro_batches)

    def share_of(self, micro_batches: int) -> range:
        """The micro-batches that this rank computes in a step of so many, in order."""
        return self._shares.share(micro_batches)

    @property
    def remaining(self) -> range:
        """The micro-batches of `share` that this rank has not run yet; all of them between two steps."""
        return self.share[self._run :]

    def begin(self, micro_batches: int | None = None) -> None:
        """Start a step, of another number of micro-batches if given; every rank must call it with the same number.

        Without it the first `micro_batch` starts a full step. With fewer micro-batches than ranks some have an empty
        share; they call `begin` and `finish` all the same. An unfinished step is thrown away (after an error, only
        without DDP, and with contiguous shares of whole gradients).
        """
        micro_batches = self.micro_batches if micro_batches is None else micro_batches
        if micro_batches < 1:
            raise ValueError(f"a step needs at least one micro-batch, got {micro_batches}")
        if not self._has_begun:  # a step may be begun again on some ranks alone, which must not meet a collective
            if self._to_compare is not None and self._steps.bit_count() <= self.compares_updates:
                when = f"after step {self._steps} of this start" if self._steps else "before the first step"
                require_equal_weights(self._to_compare, self._inner, when)
            self._steps += 1
        self._shares.begin(micro_batches)
        self.share = self._shares.share(micro_batches)
        self._has_begun, self._run = True, 0
        for parameter in itertools.chain(self._gradients.parameters, self._reduced):
            parameter.grad = None
        self._statistics.begin()
        self._foreign.begin(self._statistics.layers)
        self._written.begin(by_values=self._steps.bit_count() == 1 and len(self.share) > 1)

    @contextlib.contextmanager
    def micro_batch(self, index: int, weight: float = 1.0) -> Iterator[None]:
        """Run one forward and backward of micro-batch `index`; in the order of `share`, one backward each.

        `weight` is the micro-batch's weight in the batch-norm statistics: its number of samples where they differ.
        Raises ValueError for a micro-batch out of turn, RuntimeError for gradients that were made outside.
        """
        if not self._has_begun:
            self.begin()
        if index not in self.remaining[:1]:
            raise ValueError(f"micro-batch {index} is out of turn: this rank computes {self.share}, in order")
        self._trained.refuse_changes()
        self._gradients.refuse_foreign()
        try:
            with self._shares.backward(index):
                yield
        except Exception as error:
            if self._channel.error is not None and self._channel.error is not error:
                raise self._channel.error from error
            raise
        self._shares.push(self._statistics.take(weight))
        self._run += 1
        self._written.refuse_changes(is_last=not self.remaining)

    def finish(self, scale: float = 1.0) -> None:
        """Complete the step: every `grad` is the sum over all micro-batches times `scale`, batch-norm buffers are
        updated.

        Raises RuntimeError if micro-batches are missing, for gradients that were made outside of `micro_batch`, if DDP
        left parameters out of the last backward; OtherWeights if another rank has another scale; the exchange's error.
        """
        if not self._has_begun:
            self.begin()
        if self.remaining:
            raise RuntimeError(f"micro-batch {self.remaining[0]} of {self.share} has not been run")
        self._trained.refuse_changes()
        self._foreign.refuse_changed()
        total = self._statistics.zeros()
        self._shares.finish(total)
        scale_gradients_(self._reduced, scale)
        if self.compares_updates and self._to_compare is not None:
            require_equal_scale(self._channel, scale, self._steps)
        self._statistics.finish(total)
        self._has_begun, self._run, self.share = False, 0, self._full_share

    def clip_gradients_(self, max_norm: float) -> Tensor:
        """Multiply all gradients by max_norm / norm where that is below 1; returns the norm, the same on any layout.

        A collective where each rank owns a part. Call it between `finish` (and a scaler's `unscale_`) and the update.
        """
        norm = gradient_norm(self._reduced) if self._own is None else self._own.norm()
        clip_gradients_(self._reduced, norm, max_norm)
        return norm

    def give_up(self, error: Exception) -> None:
        """Let the exchange that is under way, and each later one, fail with this error at once; from any thread.

        gloo does not wake a thread whose message was partly sent or received when its peer was lost
        (`Pair::signalException` in its tcp/pair.cc): it waits for the group's timeout.
        """
        self._channel.give_up(error)

    def close(self, waits: bool = True) -> None:
        """End the communication threads and their process group, and give the batch-norm layers their momenta back.

        Waits until gloo's connections are closed; without `waits`, a thread does so on a CPU.
        """
        self._statistics.restore()
        self._has_begun, self._run, self.share = False, 0, self._full_share
        self._to_compare = None  # who holds a process group keeps gloo's threads running when it is destroyed
        self._shares.close()
        self._channel.close(waits)

    def __exit__(self, *_: object) -> None:
        self.close()

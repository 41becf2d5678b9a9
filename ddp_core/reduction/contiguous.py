"""Contiguous shares: every rank computes neighbouring micro-batches, and ranks exchange once, at the end of a step.

Where DistributedDataParallel allows it, the exchange overlaps with the last backward: DDP's communication hook sums
each bucket as soon as its gradients are there. Otherwise all is exchanged after the last backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_core.base.seeds import share_of
from ddp_core.base.torch_internals import foreach_copy_, keep_static_graph_from_reducing, rebuild_buckets
from ddp_core.base.user_code import our_code

from .communication import Channel, Transfer
from .flat import Gradients, flat_groups, laid_out, views_of
from .tree import GradientTree, Subtree, add_, are_siblings


class ContiguousShares:
    """Each rank adds up what it can alone; ranks exchange the rest."""

    def __init__(self, ddp: DistributedDataParallel | None, gradients: Gradients, channel: Channel) -> None:
        self._ddp, self._gradients, self._channel = ddp, gradients, channel
        self._rank, self._world_size = channel.ordered_sum.rank, channel.ordered_sum.world_size
        self._dealt = channel.ordered_sum.parts
        self._hook = HookState(channel, {parameter: index for index, parameter in enumerate(gradients.parameters)})
        self._all_used: bool | None = None
        """Whether each micro-batch of the first step had a gradient for each parameter; None before that is known."""
        self._uses_all = True
        if ddp is not None:
            ddp.register_comm_hook(self._hook, our_code(_reduce_bucket))

    def share(self, micro_batches: int) -> range:
        return share_of(micro_batches, self._rank, self._dealt or self._world_size)

    def begin(self, micro_batches: int) -> None:
        # torch miscounts the backwards of a static graph under no_sync and then reduces too early or never
        # (https://github.com/pytorch/pytorch/pull/187732). Where it looks for unused parameters, it insists that a
        # gradient from under no_sync is still there.
        self._can_overlap = (
            self._ddp is not None and not self._ddp.static_graph and not self._ddp.find_unused_parameters
        )
        self._overlapped = self._can_overlap and self._all_used is True and micro_batches >= self._world_size
        if self._ddp is not None and not self._overlapped:
            # A collective that DDP would run in the next forward, which a rank with an empty share does not have.
            rebuild_buckets(self._ddp)
        share = self.share(micro_batches)
        self._tree = GradientTree(micro_batches, share.start, share.stop)
        self._statistics = GradientTree(micro_batches, share.start, share.stop)
        self._hook.reduced.clear()
        self._hook.absent.clear()

    @contextlib.contextmanager
    def backward(self, index: int) -> Iterator[None]:
        silence: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._overlapped and index == self._tree.span.stop - 1:
            self._hook.tree = self._tree
        elif self._ddp is not None:
            if self._ddp.static_graph:
                keep_static_graph_from_reducing(self._ddp)
            silence = self._ddp.no_sync()
        try:
            with silence:
                yield
        finally:
            self._hook.tree = None

    def push(self, statistics: Tensor) -> None:
        if self._overlapped and self._tree.next_leaf == self._tree.span.stop - 1:
            self._tree.next_leaf += 1
        else:
            gradients = self._gradients.take()
            self._uses_all = self._uses_all and all(gradient is not None for gradient in gradients)
            self._tree.push(gradients)
        if statistics.numel():
            self._statistics.push([statistics])

    def finish(self, statistics: Tensor) -> None:
        if not self._overlapped:
            self._sum_all()
            if self._can_overlap and self._all_used is None:
                lacks = [not self._uses_all]
                self._all_used = not any(self._channel.largest(lacks) if self._world_size > 1 else lacks)
        elif len(self._hook.reduced) < len(self._gradients.parameters):
            # DDP sends whole buckets, one after another, so most of what it has not sent may have its gradient.
            unsent = [index for index in range(len(self._gradients.parameters)) if index not in self._hook.reduced]
            missing = [index for index in unsent if self._gradients.parameters[index].grad is None] or unsent
            name = self._gradients.names[missing[0]].removeprefix("module.")
            raise RuntimeError(
                f"no gradient for {name} ({len(missing)} parameters) in this rank's last micro-batch, as the first "
                "step had it: construct DistributedDataParallel with find_unused_parameters=True "
                "(`ddp train`: --set ddp.find_unused_parameters=true, also with --resume)"
            )
        elif self._world_size > 1 and self._ddp is not None:
            # Else DDP would do so in the next forward, where other ranks may be asked something at that moment.
            rebuild_buckets(self._ddp)
            self._require_gradients()
        if statistics.numel():
            own = [tensor for subtree in self._statistics.subtrees for tensor in subtree.tensors if tensor is not None]
            self._channel.sum(own, statistics, self._tree.leaves)

    def _require_gradients(self) -> None:
        """Raise RuntimeError on all ranks for a parameter that no rank has a gradient for.

        Its `.grad` is None in one process, but here it is the sum, of -0.0 alone, and weight decay would then change
        the parameter. No rank asks another: where a gradient is absent on all of them, each sees the same sum.
        """
        parameters = self._gradients.parameters
        absent = ((index, parameters[index].grad) for index in sorted(self._hook.absent))
        if unused := [
            index for index, total in absent if total is None or bool(((total == 0) & total.signbit()).all())
        ]:
            name = self._gradients.names[unused[0]].removeprefix("module.")
            raise RuntimeError(
                f"backward came by {name} and gave it no gradient in any micro-batch, as a Function of yours does that "
                "returns None: construct DistributedDataParallel with find_unused_parameters=True "
                "(`ddp train`: --set ddp.find_unused_parameters=true)"
            )

    def close(self) -> None:
        """Do nothing: the channel holds everything that has to be released."""

    def _sum_all(self) -> None:
        """Sum the gradients over ranks, after the last backward."""
        self._gradients.refuse_foreign()
        subtrees, parameters = self._tree.subtrees, self._gradients.parameters
        if self._world_size == 1:
            assert len(subtrees) == 1
            for parameter, gradient in zip(parameters, subtrees[0].tensors, strict=True):
                parameter.grad = gradient
            return
        # A rank without a micro-batch has no subtree.
        own_gradients = zip(*(subtree.tensors for subtree in subtrees), strict=True)
        used = [any(gradient is not None for gradient in each) for each in own_gradients] or [False] * len(parameters)
        present = [position for position, seen in enumerate(self._channel.largest(used)) if seen]
        gradients: list[Tensor] = []
        for position in present:
            # The sum over ranks overwrites the first of this rank's own sums, where it has one.
            own_sums = (subtree.tensors[position] for subtree in subtrees)
            first = next((each for each in own_sums if each is not None), None)
            gradients.append(torch.zeros_like(parameters[position]) if first is None else first)
            parameters[position].grad = gradients[-1]
        for group in flat_groups(gradients):
            sums = [gradients[member] for member in group]
            own = [laid_out([subtree.tensors[present[member]] for member in group], sums) for subtree in subtrees]
            out = own[-1] if own else laid_out(sums, sums)
            self._channel.sum(own, out, self._tree.leaves)
            foreach_copy_(sums, views_of(out, sums))


@dataclass
class HookState:
    """What DDP's communication hook knows.

    It must not lead back to the DDP module: DDP holds it from C++, where no garbage collector looks.
    """

    channel: Channel
    positions: dict[Tensor, int]
    """The position of each parameter among the gradients."""
    tree: GradientTree | None = None
    """The gradients of this rank's earlier micro-batches while the backward of the last one runs; None otherwise."""
    reduced: set[int] = field(default_factory=set)
    """The positions of the parameters that were reduced in this step."""
    absent: set[int] = field(default_factory=set)
    """The positions among these for which no micro-batch of this rank has a gradient."""


def _reduce_bucket(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The hook: sum a bucket over this rank's micro-batches and over ranks, in the background of the backward.

    DDP insists on the name `bucket`.
    """
    tree, channel = state.tree, state.channel
    if channel.closed or tree is None:
        raise RuntimeError("backward outside ExactReduction.micro_batch: use module.no_sync(), or the inner module")
    buffer, parameters = bucket.buffer(), bucket.parameters()
    positions = [state.positions[parameter] for parameter in parameters]
    state.reduced.update(positions)
    state.absent.update(
        position
        for parameter, position in zip(parameters, positions, strict=True)
        if parameter.grad is None and all(subtree.tensors[position] is None for subtree in tree.subtrees)
    )

    def transfer() -> Transfer:
        own = _fold_into_bucket(buffer, parameters, positions, tree)
        yield from channel.ordered_sum.phases(own, buffer, tree.leaves)
        return buffer

    return channel.submit(transfer(), buffer)


# DDP compares the annotations with classes, not with the strings that `from __future__ import annotations` leaves.
_reduce_bucket.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}


def _fold_into_bucket(
    buffer: Tensor, parameters: Sequence[Tensor], positions: Sequence[int], tree: GradientTree
) -> list[Tensor]:
    """Add the last leaf's sibling subtrees into the bucket; return this rank's flat subtrees, the bucket last."""
    gradients = views_of(buffer, parameters)
    for parameter, view in zip(parameters, gradients, strict=True):
        if parameter.grad is None:
            view.fill_(-0.0)  # Autograd came by without a gradient, and DDP wrote +0.0 for it.
    stack = list(tree.subtrees)
    last = Subtree(tree.last_leaf, list(gradients))
    while stack and are_siblings(stack[-1].span, last.span, tree.leaves):
        left = stack.pop()
        add_(last.tensors, [left.tensors[position] for position in positions])
        last.span = left.span._replace(stop=last.span.stop)
    return [*(laid_out([each.tensors[position] for position in positions], parameters) for each in stack), buffer]

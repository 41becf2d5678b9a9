"""What the exact reduction needs of DistributedDataParallel: a communication hook, and backwards without one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_core.base.torch_internals import keep_static_graph_from_reducing
from ddp_core.base.user_code import our_code

from .communication import Channel, Job
from .flat import fill_, views_of
from .tree import GradientTree, Subtree, add_, are_siblings


class BucketHook:
    """A communication hook that sums each bucket in the canonical tree, in the background, while backward goes on.

    It works for the backward that runs while `tree` is set, with the gradients of this rank's earlier micro-batches. It
    must not lead back to the DDP module: DDP holds it from C++, where no garbage collector looks.
    """

    def __init__(self, parameters: Sequence[Tensor], channel: Channel) -> None:
        self._position = {parameter: position for position, parameter in enumerate(parameters)}
        self._channel = channel
        self.tree: GradientTree | None = None
        self.reduced: set[int] = set()
        """The positions of the parameters that were reduced in this step."""

    def register(self, ddp: DistributedDataParallel) -> None:
        """Make it the hook of `ddp`, once and for all."""
        ddp.register_comm_hook(self, _hook)

    @our_code
    def reduce(self, buffer: Tensor, parameters: Sequence[Tensor]) -> torch.futures.Future[Tensor]:
        """Fold the bucket's gradients with this rank's earlier micro-batches and sum over ranks, in the background."""
        tree = self.tree
        if self._channel.closed or tree is None:
            raise RuntimeError("backward outside ExactReduction.micro_batch: use module.no_sync(), or the inner module")
        positions = [self._position[parameter] for parameter in parameters]
        self.reduced.update(positions)

        def job() -> Job:
            own = _fold_into_bucket(buffer, parameters, positions, tree)
            yield from self._channel.ordered_sum.phases(own, buffer, tree.leaves)
            return buffer

        return self._channel.submit(job(), buffer)


def _hook(state: BucketHook, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The DDP communication hook; DDP insists on the name `bucket`."""
    return state.reduce(bucket.buffer(), bucket.parameters())


# DDP compares the annotations with classes, not with the strings that `from __future__ import annotations` leaves.
_hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}


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
    own = []
    for subtree in stack:
        flat = torch.empty_like(buffer)
        fill_(views_of(flat, parameters), [subtree.tensors[position] for position in positions])
        own.append(flat)
    return [*own, buffer]


@contextlib.contextmanager
def no_sync(ddp: DistributedDataParallel) -> Iterator[None]:
    """`ddp.no_sync()`, mended for static graphs: their first backward would reduce even so."""
    if ddp.static_graph:
        keep_static_graph_from_reducing(ddp)
    with ddp.no_sync():
        yield


def can_overlap(ddp: DistributedDataParallel) -> bool:
    """Whether DDP's hook may reduce in the last backward of several.

    torch miscounts the backwards of a static graph under no_sync and then reduces too early or never
    (https://github.com/pytorch/pytorch/pull/187732); looking for unused parameters it insists that a gradient from
    under no_sync is still there. Both reduce after the last backward instead.
    """
    return not ddp.static_graph and not ddp.find_unused_parameters


def refuse_inexact(ddp: DistributedDataParallel) -> None:
    """Raise ValueError for options of DDP that no reduction can make exact."""
    if ddp.broadcast_buffers and any(True for _ in ddp.buffers()):
        raise ValueError(
            "construct DistributedDataParallel with broadcast_buffers=False: it overwrites micro-batch statistics"
        )
    if ddp.mixed_precision is not None:
        raise ValueError("DistributedDataParallel's mixed_precision is not exact: use torch.autocast")
    if ddp.parameters_to_ignore:
        raise ValueError(
            f"DistributedDataParallel ignores {sorted(ddp.parameters_to_ignore)[0]}: its gradient would differ"
        )

"""Gradients that are the same bits on one process and on any number of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_core.shares import share_of
from ddp_core.torch_internals import (
    foreach_copy_,
    foreach_mul_,
    keep_static_graph_from_reducing,
    rebuild_buckets,
    timeout_of,
)

from .batch_statistics import BatchStatistics, foreign_buffers, foreign_buffers_changed
from .communication import CommunicationThread
from .ordered_sum import OrderedSum
from .tree import GradientTree, Subtree, add_, are_siblings, share

# Elements summed at once where DDP's buckets do not say: bounds the extra memory (32 MiB of float32).
_FLAT_ELEMENTS = 8 * 1024 * 1024


def take_gradients(parameters: Iterable[Tensor]) -> list[Tensor | None]:
    """Take every `.grad` away without a copy (None where there is none): a leaf for GradientTree.push."""
    gradients = []
    for parameter in parameters:
        gradients.append(parameter.grad)
        parameter.grad = None
    return gradients


class ExactReduction:
    """Sums the gradients of `micro_batches` micro-batches in the canonical tree, on one process or many.

    `module` is a DistributedDataParallel (a communication hook is registered once and for all, and the exchange
    overlaps with the last backward; not with `static_graph` or `find_unused_parameters`), a plain module with
    `process_group` (one blocking exchange at the end), or a plain module alone. A step:

        for index in exact.share:
            with exact.micro_batch(index):
                loss_sum(module(x[index]), y[index]).backward()    # once, a sum over samples
        exact.finish(scale=1 / samples)                           # every p.grad: the sum times scale
        optimizer.step()

    A micro-batch in which a parameter gets no gradient adds nothing to it; without one in any it keeps `grad=None`
    (DDP needs `find_unused_parameters=True` for both). Batch-norm statistics: see
    BatchStatistics. `begin` starts a step with another number of micro-batches. `close` (or `with ExactReduction(...)
    as exact`) ends the thread and its process group; call it before the DDP module is dropped, and drop that
    (`gc.collect()`) before `destroy_process_group()`.

    Raises ValueError for what cannot be exact: more ranks than micro-batches, `broadcast_buffers=True` with buffers,
    SyncBatchNorm, DDP's mixed precision or ignored parameters, sparse gradients, and in the first step a buffer that
    forward changes.
    """

    def __init__(
        self,
        module: nn.Module,
        micro_batches: int,
        *,
        process_group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        self.module = module
        self._ddp = module if isinstance(module, DistributedDataParallel) else None
        group: dist.ProcessGroup | None = process_group
        if self._ddp is not None:
            _refuse_inexact(self._ddp)
            group = self._ddp.process_group
        self._rank, self._world_size = (group.rank(), group.size()) if group is not None else (0, 1)
        self.micro_batches = micro_batches
        share(micro_batches, self._rank, self._world_size)
        names = {id(parameter): name for name, parameter in module.named_parameters() if parameter.requires_grad}
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._names = [names[id(parameter)] for parameter in self._parameters]
        self._statistics = BatchStatistics(module)
        self._foreign: dict[str, Tensor] | None = None
        self._checked = False
        self._step: _Step | None = None

        self._group: dist.ProcessGroup | None = None
        if group is not None and self._world_size > 1:
            device = self._parameters[0].device if self._parameters else torch.device("cpu")
            self._group = _own_group(group, device, timeout)
        self._channel = _Channel(self._parameters, OrderedSum(self._group))
        if self._ddp is not None:
            # The hook's state must not lead back to the DDP module: DDP holds it from C++, where no garbage collector
            # looks.
            self._ddp.register_comm_hook(self._channel, _hook)

    @property
    def share(self) -> range:
        """The micro-batches that this rank computes in the step at hand (else in a full one)."""
        micro_batches = self._step.micro_batches if self._step is not None else self.micro_batches
        return share_of(micro_batches, self._rank, self._world_size)

    def begin(self, micro_batches: int | None = None) -> None:
        """Start a step, of another number of micro-batches if given; every rank must call it with the same number.

        Without it the first `micro_batch` starts a full step. With fewer micro-batches than ranks some have an empty
        share; they call `begin` and `finish` all the same. An unfinished step is thrown away (after an error, only
        without DDP).
        """
        micro_batches = self.micro_batches if micro_batches is None else micro_batches
        if micro_batches < 1:
            raise ValueError(f"a step needs at least one micro-batch, got {micro_batches}")
        overlapped = self._ddp is not None and _can_overlap(self._ddp) and micro_batches >= self._world_size
        if self._ddp is not None and not overlapped:
            # A collective that DDP would run in the next forward, which a rank with an empty share does not have.
            rebuild_buckets(self._ddp)
        self._step = _Step(micro_batches, share_of(micro_batches, self._rank, self._world_size), overlapped)
        take_gradients(self._parameters)
        self._statistics.begin()
        if not self._checked:
            self._foreign = foreign_buffers(self.module)

    @contextlib.contextmanager
    def micro_batch(self, index: int, weight: float = 1.0) -> Iterator[None]:
        """Run one forward and backward of micro-batch `index`; in the order of `share`, one backward each.

        `weight` is the micro-batch's weight in the batch-norm statistics: its number of samples where they differ.
        """
        if self._step is None:
            self.begin()
        step = self._step
        assert step is not None
        if step.tree.complete or index != step.tree.next_leaf:
            raise ValueError(f"micro-batch {index} is out of turn: this rank computes {self.share}, in order")
        last = step.overlapped and index == step.tree.span.stop - 1
        if last:
            self._channel.step = step
        try:
            with _no_sync(self._ddp) if self._ddp is not None and not last else contextlib.nullcontext():
                yield
        except Exception as error:
            if self._channel.error is not None and self._channel.error is not error:
                raise self._channel.error from error
            raise
        finally:
            self._channel.step = None
        gradients = take_gradients(self._parameters) if not last else []
        if any(gradient is not None and gradient.is_sparse for gradient in gradients):
            raise ValueError("sparse gradients have no fixed shape to sum in order: use sparse=False")
        if last:
            step.tree.next_leaf += 1
        else:
            step.tree.push(gradients)
        step.statistics.push([self._statistics.take(weight)])

    def finish(self, scale: float = 1.0) -> None:
        """Complete the step: every `grad` is the sum over all micro-batches times `scale`, batch-norm buffers are
        updated.

        Raises RuntimeError if micro-batches are missing or DDP left parameters out of the last backward, and what the
        exchange raised if that failed.
        """
        if self._step is None:
            self.begin()
        step = self._step
        assert step is not None
        if not step.tree.complete:
            raise RuntimeError(f"micro-batch {step.tree.next_leaf} of {self.share} has not been run")
        if step.overlapped:
            if missing := [name for index, name in enumerate(self._names) if index not in step.reduced]:
                raise RuntimeError(
                    f"no gradient for {missing[0]} ({len(missing)} parameters) in this rank's last micro-batch: "
                    "construct DistributedDataParallel with find_unused_parameters=True"
                )
        else:
            self._channel.sum_all(step, self._parameters)
        self._finish_statistics(step)
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if scale != 1.0 and gradients:
            foreach_mul_(gradients, scale)
        self._step = None
        self._refuse_foreign_buffers()

    def close(self) -> None:
        """End the communication thread and its process group, and give the batch-norm layers their momenta back."""
        self._statistics.restore()
        self._step = None
        if self._channel.close() and self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def __enter__(self) -> ExactReduction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _finish_statistics(self, step: _Step) -> None:
        if self._statistics:
            total = self._statistics.zeros()
            own = [tensor for subtree in step.statistics.subtrees for tensor in subtree.tensors if tensor is not None]
            self._channel.sum(own, total, step.micro_batches)
            self._statistics.finish(total)

    def _refuse_foreign_buffers(self) -> None:
        if self._foreign is not None:
            changed = foreign_buffers_changed(self._foreign, foreign_buffers(self.module))
            self._foreign, self._checked = None, True
            if changed:
                raise ValueError(
                    f"forward changes the buffer {changed[0]}, which depends on the layout: use plain reduction"
                )


class _Step:
    """What is known of the step at hand."""

    def __init__(self, micro_batches: int, own: range, overlapped: bool) -> None:
        self.micro_batches = micro_batches
        self.overlapped = overlapped
        self.tree = GradientTree(micro_batches, own.start, own.stop)
        self.statistics = GradientTree(micro_batches, own.start, own.stop)
        self.reduced: set[int] = set()


class _Channel:
    """What the hook and the training thread share: the parameters, the step, the thread that talks to other ranks."""

    def __init__(self, parameters: Sequence[Tensor], ordered_sum: OrderedSum) -> None:
        self._position = {parameter: position for position, parameter in enumerate(parameters)}
        self._ordered_sum = ordered_sum
        self._thread = CommunicationThread("exact-reduction") if ordered_sum.world_size > 1 else None
        self._closed = False
        self.step: _Step | None = None

    @property
    def error(self) -> Exception | None:
        return self._thread.error if self._thread is not None else None

    def close(self) -> bool:
        self._closed = True
        return self._thread is None or self._thread.close()

    def reduce_bucket(self, buffer: Tensor, parameters: Sequence[Tensor]) -> torch.futures.Future[Tensor]:
        """Fold the bucket's gradients with this rank's earlier micro-batches and sum over ranks, in the background."""
        step = self.step
        if self._closed or step is None:
            raise RuntimeError("backward outside ExactReduction.micro_batch: use module.no_sync(), or the inner module")
        positions = [self._position[parameter] for parameter in parameters]
        step.reduced.update(positions)

        def job() -> Tensor:
            own = _fold_into_bucket(buffer, parameters, positions, step.tree)
            self._ordered_sum(own, buffer, step.micro_batches)
            return buffer

        if self._thread is not None:
            return self._thread.submit(job, buffer)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        with torch.no_grad():
            future.set_result(job())
        return future

    def sum(self, own: Sequence[Tensor], out: Tensor, micro_batches: int) -> None:
        """Sum flat tensors over ranks; wait for it."""

        def job() -> Tensor:
            self._ordered_sum(own, out, micro_batches)
            return out

        if self._thread is None:
            job()
        else:
            self._thread.submit(job, out).wait()

    def sum_all(self, step: _Step, parameters: Sequence[Tensor]) -> None:
        """Set every parameter's `.grad` to the sum over ranks of the step's trees; wait for it."""
        subtrees = step.tree.subtrees
        if self._thread is None:
            assert len(subtrees) == 1
            for parameter, gradient in zip(parameters, subtrees[0].tensors, strict=True):
                parameter.grad = gradient
            return
        used = self._used_anywhere(subtrees, parameters)
        present = [position for position, seen in enumerate(used) if seen]
        for position in present:
            parameters[position].grad = _first_gradient(subtrees, position, parameters[position])
        for positions in _flat_groups(present, parameters):
            gradients = [_gradient(parameters[position]) for position in positions]
            own = [_flatten([subtree.tensors[position] for position in positions], gradients) for subtree in subtrees]
            out = own[-1] if own else torch.cat([gradient.reshape(-1) for gradient in gradients])
            self.sum(own, out, step.micro_batches)
            sizes = [gradient.numel() for gradient in gradients]
            parts = [part.view(g.shape) for part, g in zip(torch.split(out, sizes), gradients, strict=True)]
            foreach_copy_(gradients, parts)

    def _used_anywhere(self, subtrees: Sequence[Subtree], parameters: Sequence[Tensor]) -> list[bool]:
        used = torch.zeros(len(parameters), dtype=torch.float32, device=parameters[0].device if parameters else None)
        for subtree in subtrees:
            used += torch.tensor([float(t is not None) for t in subtree.tensors], device=used.device)
        # A count per rank is one leaf of a tree over ranks; small integers add exactly.
        self.sum([used], used, self._ordered_sum.world_size)
        return [count > 0 for count in used.tolist()]


def _hook(state: _Channel, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The DDP communication hook; DDP insists on the name `bucket`."""
    return state.reduce_bucket(bucket.buffer(), bucket.parameters())


# DDP compares the annotations with classes, not with the strings that `from __future__ import annotations` leaves.
_hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}


def _fold_into_bucket(
    buffer: Tensor, parameters: Sequence[Tensor], positions: Sequence[int], tree: GradientTree
) -> list[Tensor]:
    """Add the last leaf's sibling subtrees into the bucket; return this rank's flat subtrees, the bucket last."""
    gradients = _views(buffer, parameters)
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
        for view, position in zip(_views(flat, parameters), positions, strict=True):
            gradient = subtree.tensors[position]
            if gradient is None:
                view.fill_(-0.0)
            else:
                view.copy_(gradient)
        own.append(flat)
    return [*own, buffer]


def _views(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Cut a bucket as DDP does: in the parameter's own memory order where that is dense.

    (torch/csrc/distributed/c10d/reducer.cpp, initialize_bucket_views; GradBucket.gradients ignores the order.)
    """
    views, start = [], 0
    for parameter in parameters:
        part = flat[start : start + parameter.numel()]
        start += parameter.numel()
        reach = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True)) + 1
        dense = parameter.numel() > 0 and reach == parameter.numel()
        views.append(part.as_strided(parameter.shape, parameter.stride()) if dense else part.view(parameter.shape))
    return views


def _first_gradient(subtrees: Sequence[Subtree], position: int, parameter: Tensor) -> Tensor:
    for subtree in subtrees:
        if (gradient := subtree.tensors[position]) is not None:
            return gradient
    return torch.zeros_like(parameter)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _flatten(tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    return torch.cat(
        [
            (torch.full_like(shape, -0.0) if tensor is None else tensor).reshape(-1)
            for tensor, shape in zip(tensors, like, strict=True)
        ]
    )


def _flat_groups(positions: Sequence[int], parameters: Sequence[Tensor]) -> list[list[int]]:
    """Group parameters of one dtype and device into pieces of bounded size, the same on every rank."""
    groups: list[list[int]] = []
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for position in positions:
        gradient = _gradient(parameters[position])
        key = (gradient.dtype, gradient.device)
        group, elements = open_groups.get(key, ([], _FLAT_ELEMENTS))
        if elements >= _FLAT_ELEMENTS:
            group, elements = [], 0
            groups.append(group)
        group.append(position)
        open_groups[key] = (group, elements + gradient.numel())
    return groups


@contextlib.contextmanager
def _no_sync(ddp: DistributedDataParallel) -> Iterator[None]:
    """`ddp.no_sync()`, mended for static graphs: their first backward would reduce even so."""
    if ddp.static_graph:
        keep_static_graph_from_reducing(ddp)
    with ddp.no_sync():
        yield


def _can_overlap(ddp: DistributedDataParallel) -> bool:
    """Whether DDP's hook may reduce in the last backward of several.

    torch miscounts the backwards of a static graph under no_sync and then reduces too early or never
    (https://github.com/pytorch/pytorch/pull/187732); looking for unused parameters it insists that a gradient from
    under no_sync is still there. Both reduce after the last backward instead.
    """
    return not ddp.static_graph and not ddp.find_unused_parameters


def _own_group(group: dist.ProcessGroup, device: torch.device, timeout: timedelta | None) -> dist.ProcessGroup:
    """A process group of the same ranks for the communication thread alone: two threads' collectives must not mix."""
    ranks = dist.get_process_group_ranks(group)
    own = dist.new_group(
        ranks,
        # Not inherited by itself: a rank that is gone should be noticed here as soon as in the rest of the program.
        timeout=timeout or timeout_of(group, device),
        backend=dist.get_backend(group),
        use_local_synchronization=len(ranks) < dist.get_world_size(),
        group_desc="exact reduction",
    )
    assert isinstance(own, dist.ProcessGroup)
    return own


def _refuse_inexact(ddp: DistributedDataParallel) -> None:
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

"""The sum over all ranks in the order of the canonical tree, at the volume of a ring all-reduce.

1. Cut the N elements into W chunks; rank r sums chunk r.
2. Every rank sends chunk c of each of its subtrees to rank c: (W-1)/W * N elements where the share is one subtree.
3. Rank c adds the subtrees of chunk c in tree order.
4. Every rank sends its finished chunk to all others: (W-1)/W * N elements.

Each element sees the same additions wherever chunk and bucket borders lie, and whichever backend carries it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_core.shares import share_of

from .tree import Span, are_siblings, canonical_subtrees


class Plan:
    """Which rank brings which subtrees to a step of `micro_batches`, and in which order they are added."""

    def __init__(self, micro_batches: int, world_size: int) -> None:
        shares = [share_of(micro_batches, rank, world_size) for rank in range(world_size)]
        self.spans = [canonical_subtrees(share.start, share.stop, micro_batches) for share in shares]
        # For each subtree in order: how many additions its arrival makes possible.
        self.merges: list[int] = []
        stack: list[Span] = []
        for span in (span for spans in self.spans for span in spans):
            stack.append(span)
            self.merges.append(0)
            while len(stack) > 1 and are_siblings(stack[-2], stack[-1], micro_batches):
                right, left = stack.pop(), stack.pop()
                stack.append(Span(left.first, right.stop))
                self.merges[-1] += 1
        assert stack == [Span(0, micro_batches)]

    def add_(self, arrivals: Sequence[tuple[Tensor, dist.Work | None]], out: Tensor) -> None:
        """Add the subtrees' tensors, each once its work is done, into `out`; the tensors are overwritten."""
        stack: list[Tensor] = []
        additions = len(arrivals) - 1
        for (tensor, work), merges in zip(arrivals, self.merges, strict=True):
            if work is not None:
                work.wait()
            stack.append(tensor)
            for _ in range(merges):
                right, left = stack.pop(), stack.pop()
                additions -= 1
                stack.append(torch.add(left, right, out=left if additions else out))
        if stack[0].data_ptr() != out.data_ptr():
            out.copy_(stack[0])


@functools.lru_cache(maxsize=64)
def plan_for(micro_batches: int, world_size: int) -> Plan:
    """The plan of a step, made once."""
    return Plan(micro_batches, world_size)


class Exchange(Protocol):
    """One way to carry the chunks."""

    def sum_(self, own: Sequence[Tensor], out: Tensor, plan: Plan) -> None:
        """Sum every rank's flat subtrees `own` into `out`, which may be one of them; `own` is overwritten."""


class _Scratch:
    """One flat tensor per dtype and device, as large as the largest request so far."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def __call__(self, elements: int, like: Tensor) -> Tensor:
        key = (like.dtype, like.device)
        if key not in self._tensors or self._tensors[key].numel() < elements:
            self._tensors[key] = torch.empty(elements, dtype=like.dtype, device=like.device)
        return self._tensors[key][:elements]


# Up to this much more is sent to save a round, about what a connection carries in the time of one.
_ONE_ROUND_BYTES = 256 * 1024


class PointToPoint:
    """Sends and receives between all pairs of ranks (gloo, and any backend that has them).

    Small tensors, and all of them between two ranks (where it is no more to send), take one round: every rank sends
    its subtrees to all others and adds up everything itself.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank, self._world_size = group.rank(), group.size()
        # Everyone starts with another peer, so that no one is everyone's first.
        self._peers = [(self._rank + distance) % self._world_size for distance in range(1, self._world_size)]
        self._scratch = _Scratch()

    def sum_(self, own: Sequence[Tensor], out: Tensor, plan: Plan) -> None:
        """See `Exchange.sum_`. Raises RuntimeError when a peer is gone or silent for the group's timeout."""
        world_size, elements = self._world_size, out.numel()
        if (world_size - 2) * elements * out.element_size() <= _ONE_ROUND_BYTES:
            arrivals, sending = self._exchange(own, out, plan, [slice(0, elements)] * world_size)
            _wait(work for works in sending.values() for work in works)
            plan.add_(arrivals, out)
            return

        borders = [elements * chunk // world_size for chunk in range(world_size + 1)]
        chunks = [slice(*pair) for pair in itertools.pairwise(borders)]
        arrivals, sending = self._exchange(own, out, plan, chunks)
        answers = []
        for peer in self._peers:
            # A peer's chunk of `out` may still be on its way there; then its answer overwrites it.
            _wait(sending[peer])
            answers.append(self._receive(out[chunks[peer]], peer))
        mine = out[chunks[self._rank]]
        plan.add_(arrivals, mine)
        _wait([self._send(mine, peer) for peer in self._peers] + answers)

    def _exchange(
        self, own: Sequence[Tensor], out: Tensor, plan: Plan, chunks: Sequence[slice]
    ) -> tuple[list[tuple[Tensor, dist.Work | None]], dict[int, list[dist.Work]]]:
        """Start to send every peer its chunk of `own`; return all ranks' subtrees of mine in order, and the sends."""
        mine = chunks[self._rank]
        size = mine.stop - mine.start
        foreign = sum(len(plan.spans[peer]) for peer in self._peers)
        inbox = iter(torch.split(self._scratch(foreign * size, out), size))
        arrivals: list[tuple[Tensor, dist.Work | None]] = []
        for peer, spans in enumerate(plan.spans):
            if peer == self._rank:
                arrivals += [(flat[mine], None) for flat in own]
            else:
                parts = [next(inbox) for _ in spans]
                arrivals += [(part, self._receive(part, peer)) for part in parts]
        sending = {peer: [self._send(flat[chunks[peer]], peer) for flat in own] for peer in self._peers}
        return arrivals, sending

    def _send(self, tensor: Tensor, peer: int) -> dist.Work:
        # The group's own methods: dist.isend and dist.irecv cost as much again in checks.
        return self._group.send([tensor], peer, 0)

    def _receive(self, tensor: Tensor, peer: int) -> dist.Work:
        return self._group.recv([tensor], peer, 0)


def _wait(works: Iterable[dist.Work]) -> None:
    for work in works:
        work.wait()


class Collectives:
    """The same with `all_to_all_single` and `all_gather_into_tensor`, which NCCL carries best.

    Proved bit for bit over gloo, where it is slower than point to point. Not run on NCCL with two or more devices yet.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank, self._world_size = group.rank(), group.size()

    def sum_(self, own: Sequence[Tensor], out: Tensor, plan: Plan) -> None:
        """See `Exchange.sum_`."""
        elements = out.numel()
        size = -(-elements // self._world_size)
        # Peer-major, so that one peer's chunks of all subtrees lie together: (world_size, subtrees, size).
        outbox = out.new_zeros((self._world_size, len(own), size))
        for position, flat in enumerate(own):
            for peer, part in enumerate(torch.split(flat, size)):
                outbox[peer, position, : part.numel()].copy_(part)
        counts = [len(spans) for spans in plan.spans]
        inbox = out.new_empty(sum(counts) * size)
        dist.all_to_all_single(
            inbox,
            outbox.view(-1),
            [count * size for count in counts],
            [len(own) * size] * self._world_size,
            group=self._group,
        )
        whole = out.new_empty(self._world_size * size)
        mine = whole[self._rank * size : (self._rank + 1) * size]
        if size:
            plan.add_([(tensor, None) for tensor in torch.split(inbox, size)], mine)
        dist.all_gather_into_tensor(whole, mine, group=self._group)
        out.copy_(whole[:elements])


class OrderedSum:
    """The ordered sum on one process group: chooses the exchange by backend.

    Collective: every rank of `group` calls it in the same order with tensors of the same size and dtype. One thread
    only.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._exchanges: dict[str, Exchange] = {}

    @property
    def rank(self) -> int:
        """This process in the group; 0 without one."""
        return self._group.rank() if self._group is not None else 0

    @property
    def world_size(self) -> int:
        """Processes in the group; 1 without one."""
        return self._group.size() if self._group is not None else 1

    def __call__(self, own: Sequence[Tensor], out: Tensor, micro_batches: int) -> None:
        """Sum all ranks' subtrees over `micro_batches` leaves into `out`.

        `own` holds one flat tensor per span of `canonical_subtrees(share)`; they are overwritten, and `out` may be one.
        """
        plan = plan_for(micro_batches, self.world_size)
        if len(own) != len(plan.spans[self.rank]):
            raise ValueError(f"rank {self.rank} owns the subtrees {plan.spans[self.rank]}, got {len(own)} tensors")
        if self._group is None or self.world_size == 1:
            plan.add_([(flat, None) for flat in own], out)
        elif out.numel():
            device = out.device.type
            if device not in self._exchanges:
                # Such as "cpu:gloo,cuda:nccl".
                backends = dict(pair.split(":") for pair in dist.get_backend_config(self._group).split(","))
                exchange = Collectives if backends[device] == "nccl" else PointToPoint
                self._exchanges[device] = exchange(self._group)
            self._exchanges[device].sum_(own, out, plan)

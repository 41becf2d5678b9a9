"""Two ways to carry tensors between the ranks: messages from rank to rank, and collectives."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .plan import Plan


class Exchange(Protocol):
    """One way to carry the chunks."""

    rank: int
    world_size: int
    one_round_bytes: int
    """Up to so many bytes more are sent where that saves a round."""

    def sum_(self, own: Sequence[Tensor], out: Tensor, plan: Plan) -> None:
        """Sum every rank's flat subtrees `own` into `out`, which may be one of them; `own` is overwritten."""

    def scatter(self, flat: Tensor | None, part: Tensor, senders: int) -> Iterator[Tensor]:
        """Send each rank its part of `flat`; yield this rank's parts of ranks 0 … `senders` - 1, in order.

        `flat` (None on the other ranks) holds one part for each rank, or only one, which then goes to all. `part` shows
        the size, dtype and device of a part. The tensors that are yielded belong to the caller, `flat` no longer does.
        """

    def gather(self, part: Tensor) -> Tensor:
        """Return all ranks' parts, end to end."""


class _Scratch:
    """One flat tensor per dtype and device, as large as the largest request so far."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def __call__(self, elements: int, like: Tensor) -> Tensor:
        key = (like.dtype, like.device)
        if key not in self._tensors or self._tensors[key].numel() < elements:
            self._tensors[key] = torch.empty(elements, dtype=like.dtype, device=like.device)
        return self._tensors[key][:elements]


class PointToPoint:
    """Sends and receives between all pairs of ranks (gloo, and any backend that has them).

    Small tensors, and all of them between two ranks (where it is no more to send), take one round: every rank sends
    its subtrees to all others and adds up everything itself.
    """

    one_round_bytes = 256 * 1024  # About what a connection carries in the time of a round.

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.world_size = group.rank(), group.size()
        # Everyone starts with another peer, so that no one is everyone's first.
        self._peers = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]
        self._scratch = _Scratch()

    def sum_(self, own: Sequence[Tensor], out: Tensor, plan: Plan) -> None:
        """See `Exchange.sum_`. Raises RuntimeError when a peer is gone or silent for the group's timeout."""
        world_size, elements = self.world_size, out.numel()
        if (world_size - 2) * elements * out.element_size() <= self.one_round_bytes:
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
        mine = out[chunks[self.rank]]
        plan.add_(arrivals, mine)
        _wait([self._send(mine, peer) for peer in self._peers] + answers)

    def scatter(self, flat: Tensor | None, part: Tensor, senders: int) -> Iterator[Tensor]:
        """See `Exchange.scatter`."""
        arrivals = {peer: torch.empty_like(part) for peer in self._peers if peer < senders}
        receiving = [self._receive(arrival, peer) for peer, arrival in arrivals.items()]
        parts = [] if flat is None else torch.split(flat, part.numel())
        sending = [self._send(parts[peer % len(parts)], peer) for peer in self._peers if parts]
        if parts:
            # A view would keep the whole of `flat` alive.
            arrivals[self.rank] = parts[self.rank].clone() if len(parts) > 1 else parts[0]
        _wait(sending + receiving)
        yield from (arrivals.pop(sender) for sender in range(senders))

    def gather(self, part: Tensor) -> Tensor:
        """See `Exchange.gather`."""
        whole = part.new_empty(self.world_size * part.numel())
        parts = whole.view(self.world_size, -1)
        receiving = [self._receive(parts[peer], peer) for peer in self._peers]
        sending = [self._send(part, peer) for peer in self._peers]
        parts[self.rank].copy_(part)
        _wait(sending + receiving)
        return whole

    def _exchange(
        self, own: Sequence[Tensor], out: Tensor, plan: Plan, chunks: Sequence[slice]
    ) -> tuple[list[tuple[Tensor, dist.Work | None]], dict[int, list[dist.Work]]]:
        """Start to send every peer its chunk of `own`; return all ranks' subtrees of mine in order, and the sends."""
        mine = chunks[self.rank]
        size = mine.stop - mine.start
        foreign = sum(len(plan.spans[peer]) for peer in self._peers)
        inbox = iter(torch.split(self._scratch(foreign * size, out), size))
        arrivals: list[tuple[Tensor, dist.Work | None]] = []
        for peer, spans in enumerate(plan.spans):
            if peer == self.rank:
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

    one_round_bytes = -1  # all_to_all_single sends every rank another part.

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.world_size = group.rank(), group.size()

    def sum_(self, own: Sequence[Tensor], out: Tensor, plan: Plan) -> None:
        """See `Exchange.sum_`."""
        elements = out.numel()
        size = -(-elements // self.world_size)
        # Peer-major, so that one peer's chunks of all subtrees lie together: (world_size, subtrees, size).
        outbox = out.new_zeros((self.world_size, len(own), size))
        for position, flat in enumerate(own):
            for peer, part in enumerate(torch.split(flat, size)):
                outbox[peer, position, : part.numel()].copy_(part)
        counts = [len(spans) for spans in plan.spans]
        inbox = out.new_empty(sum(counts) * size)
        dist.all_to_all_single(
            inbox,
            outbox.view(-1),
            [count * size for count in counts],
            [len(own) * size] * self.world_size,
            group=self._group,
        )
        whole = out.new_empty(self.world_size * size)
        mine = whole[self.rank * size : (self.rank + 1) * size]
        if size:
            plan.add_([(tensor, None) for tensor in torch.split(inbox, size)], mine)
        dist.all_gather_into_tensor(whole, mine, group=self._group)
        out.copy_(whole[:elements])

    def scatter(self, flat: Tensor | None, part: Tensor, senders: int) -> Iterator[Tensor]:
        """See `Exchange.scatter`."""
        size = part.numel()
        inbox = part.new_empty(senders * size)
        dist.all_to_all_single(
            inbox,
            part.new_empty(0) if flat is None else flat,
            [size * (sender < senders) for sender in range(self.world_size)],
            [size * (flat is not None)] * self.world_size,
            group=self._group,
        )
        yield from (arrival.clone() for arrival in torch.split(inbox, size))

    def gather(self, part: Tensor) -> Tensor:
        """See `Exchange.gather`."""
        whole = part.new_empty(self.world_size * part.numel())
        dist.all_gather_into_tensor(whole, part, group=self._group)
        return whole


def exchange_on(group: dist.ProcessGroup, device: torch.device) -> Exchange:
    """The exchange that suits the group's backend for tensors on `device`."""
    # Such as "cpu:gloo,cuda:nccl".
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return Collectives(group) if backends[device.type] == "nccl" else PointToPoint(group)

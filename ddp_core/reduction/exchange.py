"""How tensors travel between ranks: by single messages, by what several ranks enter together, by host memory.

What gloo does best are sends and receives of single tensors, each under way by itself. NCCL does best what several
ranks enter together; that is proved bit for bit over gloo, where it is slower than single messages, and has not run on
NCCL with two or more devices yet.

gloo sends and receives by address, and knows host memory only. So that several ranks can share a GPU over gloo, what a
sum is given is copied to the host, sent and added up there, and the sum is copied back. An addition of two numbers has
the same bits on the host and on the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

LINE_BYTES = 512
"""The parts of a tensor begin at multiples of so many bytes, as tensors do where torch gets them memory on CUDA devices
(kMinBlockSize in c10/cuda/CUDACachingAllocator.h): libraries choose kernels by how their operands are aligned."""

Arrival = tuple[Tensor, dist.Work | None]
"""A tensor that another member sends, and the work to wait for until it is there (None: it is there already)."""


@dataclass
class Collected:
    """What `collect` has started: every member's part of all tensors is on its way to that member."""

    arrivals: list[Arrival]
    """This member's part of all members' tensors: those of the first member, of the second, and so on."""
    sent: Sequence[dist.Work] = ()
    """What to wait for before this member's own tensors may be overwritten; each once."""
    end: Callable[[], object] = lambda: None
    """Call this when the tensors of `arrivals` are not used any more."""


class PointToPoint:
    """Sends and receives between all pairs of members (gloo, and any backend that can send and receive).

    `members` are ranks of a process group, all or some; `rank` is the position of this process among them.

    Messages of one pair with one tag arrive in the sequence in which they were sent. So two exchanges of one group may
    be under way at once, on threads of their own, if their tags differ by two or more: each uses two.
    """

    one_round_bytes = 256 * 1024
    """Up to so many bytes more are sent where that saves a round: about what a connection carries in this time."""

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int], tag: int = 0) -> None:
        self._group, self._members, self._tag = group, members, tag
        self.rank, self.world_size = members.index(group.rank()), len(members)
        # Each member starts with another peer, so that they do not all send to the same member first.
        self.peers = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]
        self.inboxes = Inboxes()

    def collect(self, own: Sequence[Tensor], like: Tensor, counts: Sequence[int], cuts: Sequence[slice]) -> Collected:
        """Start to send every member its part (`cuts`, one for each) of the flat tensors `own`.

        `counts` says how many tensors each member brings. `like` shows dtype and device. Waiting raises RuntimeError
        when a peer is gone or silent for the group's timeout.
        """
        mine = cuts[self.rank]
        size = mine.stop - mine.start
        foreign = (sum(counts) - counts[self.rank]) * size
        inbox = self.inboxes.take(foreign, like)
        parts = iter(torch.split(inbox[:foreign], size))
        arrivals: list[Arrival] = []
        for peer, count in enumerate(counts):
            if peer == self.rank:
                arrivals += [(flat[mine], None) for flat in own]
            elif size:
                received = [next(parts) for _ in range(count)]
                arrivals += [(part, self.receive(part, peer)) for part in received]
            else:
                arrivals += [(like.new_empty(0), None)] * count
        sent = [
            self.send(flat[cut], peer) for peer in self.peers for flat in own if (cut := cuts[peer]).start < cut.stop
        ]
        return Collected(arrivals, sent, partial(self.inboxes.give_back, inbox))

    def gather(self, flats: Sequence[tuple[Tensor, Sequence[slice]]]) -> None:
        """Fill flat tensors, of each of which every member has one part: send this one's part to all, receive theirs.

        Each tensor comes with its parts, one for each member. All of them may be on their way at once. With tag 1: sums
        are gathered while others are collected.
        """
        works = []
        for flat, cuts in flats:
            parts = [flat[cut] for cut in cuts]
            works += [self.receive(parts[peer], peer, 1) for peer in self.peers if parts[peer].numel()]
            works += [self.send(parts[self.rank], peer, 1) for peer in self.peers if parts[self.rank].numel()]
        wait_for(works)

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> dist.Work:
        """Start to send; `tag`, 0 or 1, is added to that of this exchange."""
        # The group's own methods: dist.isend and dist.irecv cost as much again in checks.
        return self._group.send([tensor], self._members[peer], self._tag + tag)

    def receive(self, tensor: Tensor, peer: int, tag: int = 0) -> dist.Work:
        """Start to receive; `tag`, 0 or 1, is added to that of this exchange."""
        return self._group.recv([tensor], self._members[peer], self._tag + tag)


class Inboxes:
    """Memory for what other members send, to be used again: as many flat tensors as were in use at once."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}

    def take(self, elements: int, like: Tensor) -> Tensor:
        """A flat tensor of so many elements or more, with the dtype and device of `like`."""
        free = self._free.setdefault((like.dtype, like.device), [])
        inbox = free.pop() if free else like.new_empty(0)
        return inbox if inbox.numel() >= elements else like.new_empty(elements)

    def give_back(self, inbox: Tensor) -> None:
        """Let it be used again."""
        self._free[inbox.dtype, inbox.device].append(inbox)


class BatchedMessages:
    """Carries tensors between ranks of a group, all messages of a round in one batch: NCCL runs it as one kernel.

    All ranks of the group must have taken part in a batch before (`exchange_on`). Without a group there is one member.
    """

    one_round_bytes = -1  # Between GPUs, bytes cost more than rounds.

    def __init__(self, group: dist.ProcessGroup | None, members: Sequence[int]) -> None:
        self._group, self._members = group, members
        self.rank, self.world_size = 0 if group is None else members.index(group.rank()), len(members)

    def collect(self, own: Sequence[Tensor], like: Tensor, counts: Sequence[int], cuts: Sequence[slice]) -> Collected:
        """As of PointToPoint."""
        size = cuts[self.rank].stop - cuts[self.rank].start
        received = [
            [flat[cuts[self.rank]] for flat in own]
            if peer == self.rank
            else [like.new_empty(size) for _ in range(count)]
            for peer, count in enumerate(counts)
        ]
        self._run(
            [(peer, flat[cut]) for peer, cut in enumerate(cuts) for flat in own],
            [(peer, tensor) for peer, tensors in enumerate(received) for tensor in tensors],
        )
        return Collected([(tensor, None) for tensors in received for tensor in tensors])

    def gather(self, flats: Sequence[tuple[Tensor, Sequence[slice]]]) -> None:
        """As of PointToPoint."""
        for flat, cuts in flats:
            parts = [flat[cut] for cut in cuts]
            self._run([(peer, parts[self.rank]) for peer in range(len(cuts))], enumerate(parts))

    def _run(self, sends: Iterable[tuple[int, Tensor]], receives: Iterable[tuple[int, Tensor]]) -> None:
        """Exchange tensors with other members, and wait; empty ones are left out."""
        operations = [
            dist.P2POp(operation, tensor, group=self._group, group_peer=self._members[peer])
            for operation, pairs in ((dist.isend, sends), (dist.irecv, receives))
            for peer, tensor in pairs
            if peer != self.rank and tensor.numel()
        ]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()


Exchange = PointToPoint | BatchedMessages
"""One way to carry tensors between members of a process group."""


def exchange_on(group: dist.ProcessGroup, device: torch.device) -> Exchange:
    """The exchange between all ranks of the group for tensors on `device`; a collective."""
    exchange = exchange_among(group, device, range(group.size()), tag=0)
    if isinstance(exchange, BatchedMessages):
        # NCCL connects ranks in the first batch of all; after that some may send to each other.
        cuts = [slice(rank, rank + 1) for rank in range(exchange.world_size)]
        exchange.gather([(torch.zeros(exchange.world_size, device=device), cuts)])
    return exchange


def exchange_among(group: dist.ProcessGroup, device: torch.device, members: Sequence[int], tag: int) -> Exchange:
    """The exchange between these ranks of the group for tensors on `device`; for `tag` see `PointToPoint`."""
    if _backend(group, device) == "nccl":
        return BatchedMessages(group, members)
    return PointToPoint(group, members, tag)


def goes_through_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether tensors on `device` are to be copied to host memory before they are exchanged."""
    return device.type != "cpu" and _backend(group, device) == "gloo"


def carries_host_memory(group: dist.ProcessGroup) -> bool:
    """Whether the group sums tensors in host memory, which one of NCCL alone does not."""
    return "cpu" in _backends(group)


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    return _backends(group)[device.type]


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    # Such as "cpu:gloo,cuda:nccl".
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Complete copies in host memory: gloo reads them at their address, without waiting for a stream."""
    copies = [like_on_host(tensor).copy_(tensor, non_blocking=True) for tensor in tensors]
    if tensors and tensors[0].is_cuda:
        # This thread alone waits, and only for what its own stream was given.
        torch.cuda.current_stream(tensors[0].device).record_event().synchronize()
    return copies


def like_on_host(tensor: Tensor) -> Tensor:
    """Memory on the host for values of the tensor."""
    # Pinned memory is costly to get, so torch keeps it and gives it out again when no copy uses it any more.
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)


def cut(elements: int, parts: int, dtype: torch.dtype) -> list[slice]:
    """Cut so many elements of a flat tensor into neighbouring parts of about one size; some parts may be empty.

    Every part begins at a multiple of `LINE_BYTES`.
    """
    line = LINE_BYTES // dtype.itemsize
    lines = -(-elements // line)
    borders = [min(elements, lines * part // parts * line) for part in range(parts + 1)]
    return [slice(*pair) for pair in itertools.pairwise(borders)]


def wait_for(works: Iterable[dist.Work]) -> None:
    """Wait until all of these are done."""
    for work in works:
        work.wait()

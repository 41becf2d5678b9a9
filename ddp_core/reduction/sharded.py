"""What contiguous and strided shares have in common where each rank needs the gradients of its own pieces alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .communication import Channel, in_one_phase
from .exchange import exchange_on
from .flat import Gradients, scale_
from .shards import Shards


def require_fit(shards: Shards, ddp: DistributedDataParallel | None, gradients: Gradients, world_size: int) -> None:
    """Raise ValueError unless the shards are those of the module's trainable parameters for this many ranks."""
    if ddp is not None:
        raise ValueError("DistributedDataParallel gives every rank all gradients: with shards, pass the module inside")
    if shards.world_size != world_size:
        raise ValueError(f"the shards are for {shards.world_size} ranks, but the process group has {world_size}")
    if list(map(id, shards.parameters)) != list(map(id, gradients.parameters)):
        raise ValueError("the shards are not those of the module: make them with Shards.of(module, world_size)")


def arrived(totals: Mapping[int, torch.futures.Future[Tensor]], scale: float) -> dict[int, Tensor]:
    """The totals when all have arrived, times `scale`: each is multiplied while the next ones are on their way."""
    found = {}
    for number, future in totals.items():
        found[number] = future.wait()
        scale_([found[number]], scale)
    return found


def set_gradients(shards: Shards, rank: int, totals: Mapping[int, Tensor], used: Sequence[bool]) -> None:
    """Give each piece of `rank` its gradient: a part of its group's sum, or None where its parameter was not used.

    `totals` are the rank's ranges of the groups' sums by the groups' numbers, `used` is by the parameters' positions.
    """
    for piece in shards.pieces(rank):
        first = shards.groups[piece.group].cuts[rank].start
        total = totals[piece.group][piece.place.start - first : piece.place.stop - first]
        piece.tensor.grad = total if used[piece.position] else None


def clear_gradients(shards: Shards, rank: int) -> None:
    """Take the gradients of the pieces of `rank` away."""
    for piece in shards.pieces(rank):
        piece.tensor.grad = None


def gather_(flats: Mapping[int, Tensor], shards: Shards, channel: Channel) -> None:
    """Bring all ranks' ranges of flat tensors, given by their groups' numbers, to every rank, and wait."""
    if channel.group is None:
        return
    exchange = exchange_on(channel.group, channel.device)
    like = torch.empty(0, device=channel.device)

    def gather() -> Tensor:
        exchange.gather([(flat, shards.groups[number].cuts) for number, flat in flats.items() if flat.numel()])
        return like

    channel.submit(in_one_phase(gather), like).wait()

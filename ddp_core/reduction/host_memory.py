"""Tensors of a device, carried through host memory: gloo sends and receives by address, and knows host memory only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .exchange import Arrival, Collected, WholeExchange


class ThroughHost:
    """An exchange for tensors of a device, made of one for host memory: with it, several ranks share a GPU over gloo.

    The members' subtrees are copied to the host, sent and added up there, and the sum is copied back. An addition of
    two numbers has the same bits on the host and on the device. Tensors that are on the host already are passed on.
    """

    def __init__(self, exchange: WholeExchange) -> None:
        self._exchange = exchange
        self.rank, self.world_size = exchange.rank, exchange.world_size
        self.one_round_bytes = exchange.one_round_bytes

    def collect(self, own: Sequence[Tensor], out: Tensor, counts: Sequence[int], cuts: Sequence[slice]) -> Collected:
        """See `Exchange.collect`."""
        if not is_elsewhere(out):
            return self._exchange.collect(own, out, counts, cuts)
        # Only what lies between the first and the last of the cuts is copied.
        start = min(cut.start for cut in cuts)
        here = slice(start, max(cut.stop for cut in cuts))
        shifted = [slice(cut.start - start, cut.stop - start) for cut in cuts]
        copy = _like_on_host(out[here])
        collected = self._exchange.collect(_on_host([flat[here] for flat in own]), copy, counts, shifted)
        return _Copied(collected, copy, out[here], shifted[self.rank])

    def gather(self, flats: Sequence[tuple[Tensor, Sequence[slice]]]) -> None:
        """See `Exchange.gather`. Flat tensors of a device travel one after the other."""
        _gather(self._exchange, flats)


@dataclass
class _Copied:
    """`Collected` for tensors of a device: `collected` puts the sums into `copy`, which is at last copied to `out`."""

    collected: Collected
    copy: Tensor
    out: Tensor
    summed: slice
    """What of `copy` holds sums at the end."""

    def __post_init__(self) -> None:
        self.arrivals: list[Arrival] = self.collected.arrivals
        self.mine = self.collected.mine

    def wait_sent(self) -> None:
        """See `Collected.wait_sent`."""
        self.collected.wait_sent()

    def expect_sums(self) -> None:
        """See `Collected.expect_sums`."""
        self.collected.expect_sums()

    def send_sum(self) -> None:
        """See `Collected.send_sum`."""
        self.summed = slice(None)
        self.collected.send_sum()

    def end(self) -> None:
        """See `Collected.end`. The sum is copied back on the current stream; torch keeps the copy until then."""
        self.collected.end()
        self.out[self.summed].copy_(self.copy[self.summed], non_blocking=True)


def is_elsewhere(tensor: Tensor) -> bool:
    """Whether the tensor is not in host memory."""
    return tensor.device.type != "cpu"


def _gather(exchange: WholeExchange, flats: Sequence[tuple[Tensor, Sequence[slice]]]) -> None:
    """Gather tensors of a device in host memory, one after the other, after those that are there already."""
    exchange.gather([(flat, cuts) for flat, cuts in flats if not is_elsewhere(flat)])
    for flat, cuts in flats:
        if is_elsewhere(flat):
            whole, mine = _like_on_host(flat), cuts[exchange.rank]
            whole[mine] = _on_host([flat[mine]])[0]
            exchange.gather([(whole, cuts)])
            flat.copy_(whole, non_blocking=True)


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Complete copies in host memory: gloo reads them at their address, without waiting for a stream."""
    copies = [_like_on_host(tensor).copy_(tensor, non_blocking=True) for tensor in tensors]
    if tensors and tensors[0].is_cuda:
        # This thread alone waits, and only for what its own stream was given.
        torch.cuda.current_stream(tensors[0].device).record_event().synchronize()
    return copies


def _like_on_host(tensor: Tensor) -> Tensor:
    # Pinned memory is costly to get, so torch keeps it and gives it out again when no copy uses it any more.
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)

"""Several devices and several processes: NCCL is gloo, DDP's buckets lie on its model's device, replicas are copied."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from tests.support.standin_cuda.lost_peers import let_messages_fail_silently
from tests.support.standin_cuda.operations import Watch
from tests.support.standin_cuda.world import WORLD, resolved

_kept: list[Any] = []
"""Torch's C++ keeps a process group alive, but not the Python object that knows of its methods here."""


class _Options:
    """As ProcessGroupNCCL.Options."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config: Any = type("Config", (), {})()


class Nccl(dist.ProcessGroupGloo):
    """As ProcessGroupNCCL; the messages go over gloo."""

    Options = _Options  # type: ignore[assignment]

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        super().__init__(store, rank, size, timeout=options._timeout)
        _kept.append(self)

    def get_error(self) -> Any:
        return type("Error", (), {"name": "SUCCESS"})

    def eager_connect_single_device(self, device: torch.device | None = None) -> None:
        resolved("cuda" if device is None else device)

    def abort(self) -> None:
        pass

    def perform_nocolor_split(self, device: torch.device) -> None:
        pass

    def comm_split_count(self) -> int:
        return 0

    def _group_start(self) -> None:
        pass

    def _group_end(self) -> None:
        pass


def replace_groups() -> None:
    """From here on processes exchange tensors of devices that are played, and replicas are copied between them."""
    module: Any = distributed_c10d
    module.ProcessGroupNCCL, module._NCCL_AVAILABLE = Nccl, True
    setattr(dist, "ProcessGroupNCCL", Nccl)  # noqa: B010
    _replace_reducer()
    _replace_futures()
    let_messages_fail_silently()
    inside: Any = torch._C
    inside._broadcast_coalesced = _broadcast_coalesced
    inside._broadcast = lambda tensor, devices: [tensor.to(resolved(each)) for each in devices]
    inside._scatter = _scatter
    inside._gather = _gather


def _replace_futures() -> None:
    """A future of C++ waits for streams of its devices: here there is nothing to wait for."""
    future: Any = torch.futures.Future
    begin = future.__init__

    def begin_on_cpu(self: Any, *, devices: Any = None) -> None:
        begin(self, devices=[each for each in devices or [] if resolved(each).type != "cuda"])

    future.__init__ = begin_on_cpu
    inside: Any = torch._C.Future
    for kind in (inside, future):
        if "then" in vars(kind):
            kind.then = _watched_callback(kind.then)


_watch: Any = Watch


def _watched_callback(then: Any) -> Any:
    """What is called when a future ends runs in a thread of C++, which watches nothing by itself."""

    def register(self: Any, callback: Any) -> Any:
        def watched(done: Any) -> Any:
            with contextlib.nullcontext() if WORLD.here.is_watched else _watch():
                return callback(done)

        return then(self, watched)

    return register


def _replace_reducer() -> None:
    """C++ makes DDP's buckets where the parameters are: here it would take them to be on the CPU."""
    ddp: Any = DistributedDataParallel
    original, forward = ddp._ddp_init_helper, ddp._pre_forward

    def init_helper(self: Any, *arguments: Any, **named: Any) -> None:
        device = _device_of(self)
        with _Factory(device):
            original(self, *arguments, **named)
        _reducers[id(self.reducer)] = device

    def pre_forward(self: Any, *arguments: Any, **named: Any) -> Any:
        # It makes the buckets anew after the first backward.
        with _Factory(_device_of(self)):
            return forward(self, *arguments, **named)

    ddp._ddp_init_helper, ddp._pre_forward = init_helper, pre_forward
    reducer: Any = dist.Reducer
    rebuild = reducer._rebuild_buckets

    def rebuild_buckets(self: Any) -> Any:
        with _Factory(_reducers.get(id(self))):
            return rebuild(self)

    reducer._rebuild_buckets = rebuild_buckets


_reducers: dict[int, torch.device | None] = {}
"""The device of each reducer's module."""


def _device_of(ddp: Any) -> torch.device | None:
    device = next((each.device for each in ddp.module.parameters()), None)
    return device if device is not None and device.type == "cuda" else None


class _Factory:
    """In the block, what C++ makes from nothing lies on the device."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._before, WORLD.here.factory = WORLD.here.factory, self._device or WORLD.here.factory

    def __exit__(self, *_: Any) -> None:
        WORLD.here.factory = self._before


def _broadcast_coalesced(tensors: list[Tensor], devices: list[int], _: int) -> list[list[Tensor]]:
    first = [each.detach() for each in tensors]
    return [first, *([each.to(resolved(device)) for each in first] for device in devices[1:])]


def _scatter(tensor: Tensor, devices: list[int], sizes: Any, dim: int, _: Any) -> list[Tensor]:
    pieces = tensor.detach().split(sizes, dim) if sizes else tensor.detach().chunk(len(devices), dim)
    return [piece.to(resolved(device)) for piece, device in zip(pieces, devices, strict=False)]


def _gather(tensors: list[Tensor], dim: int, device: int | None) -> Tensor:
    target = torch.device("cpu") if device == -1 else resolved("cuda" if device is None else device)
    return torch.cat([each.detach().to(target) for each in tensors], dim)

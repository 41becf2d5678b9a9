"""What the host sees of NCCL when a peer is gone: nothing, while the device waits for it, until somebody aborts.

gloo, which carries the messages here, raises at once; NCCL does not. So where a message of NCCL's fails, the device
"waits": no event is reached any more, and where the host waits for the device, it would do so for ever, which raises
here. An abort ends the waiting, and what should have been received is rubbish. With DDP_STANDIN_NCCL=rubbish a peer has
aborted first, which lets the kernels here end without their work: then nothing waits, and only the rubbish is there.
With DDP_STANDIN_NCCL=turns a process meets the one at its first loss, and the other at its second.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import _disable_current_modes

from tests.support.standin_cuda import tags
from tests.support.standin_cuda.world import WORLD

VARIABLE = "DDP_STANDIN_NCCL"
RUBBISH = 1.0


def let_messages_fail_silently() -> None:
    """From here on messages between devices do not raise where a peer is gone."""
    outputs: dict[str, Callable[..., Iterable[Tensor]]] = {
        "all_reduce": lambda tensor, *_, **__: [tensor],
        "broadcast": lambda tensor, *_, **__: [tensor],
        "all_to_all_single": lambda output, *_, **__: [output],
        "all_gather_into_tensor": lambda output, *_, **__: [output],
        "batch_isend_irecv": lambda operations: [each.tensor for each in operations if each.op is dist.irecv],
    }
    for name, received in outputs.items():
        _replace(name, _silent(getattr(distributed_c10d, name), received))
    abort = distributed_c10d._abort_process_group

    def abort_and_free(*groups: Any) -> None:
        abort(*groups)
        WORLD.waits_for_peer = False
        WORLD.aborts += 1

    setattr(distributed_c10d, "_abort_process_group", abort_and_free)  # noqa: B010


def _replace(name: str, function: Callable[..., Any]) -> None:
    setattr(distributed_c10d, name, function)
    setattr(dist, name, function)


def _silent(function: Callable[..., Any], received: Callable[..., Iterable[Tensor]]) -> Callable[..., Any]:
    def send(*words: Any, **named: Any) -> Any:
        tensors = list(received(*words, **named))
        if not _is_nccls(tensors, named.get("group")):
            return function(*words, **named)
        try:
            works = function(*words, **named)
        except RuntimeError:
            _lose(tensors)
            works = [] if isinstance(words[0], list) else None
        if isinstance(works, list):
            return [_SilentWork(work, tensors) for work in works]
        return _SilentWork(works, tensors) if works is not None or named.get("async_op") else None

    return send


def _is_nccls(tensors: Iterable[Tensor], group: Any) -> bool:
    return any(map(tags.is_tagged, tensors)) and dist.is_initialized() and "nccl" in dist.get_backend_config(group)


def _lose(tensors: Iterable[Tensor]) -> None:
    """The peer of a message that should have filled these tensors is gone."""
    with _disable_current_modes():
        for tensor in tensors:
            tensor.detach().fill_(RUBBISH)
    how = os.environ.get(VARIABLE)
    WORLD.waits_for_peer = how != "rubbish" and not (how == "turns" and WORLD.aborts % 2)


class _SilentWork:
    """A message on its way; None: one that has failed."""

    def __init__(self, work: Any, tensors: list[Tensor]) -> None:
        self._work, self._tensors = work, tensors

    def wait(self, *_: Any) -> bool:
        try:
            return self._work is None or bool(self._work.wait())
        except RuntimeError:
            _lose(self._tensors)
            return True

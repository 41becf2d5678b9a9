"""Random numbers for replicas that run in threads: torch's default generator of a device is one for all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ddp_core.determinism.seeds import MicroBatchSeed
from ddp_core.torch_internals import TorchDispatchMode


class KeyedRandom:
    """Gives the random operations of one thread's forward numbers of their own, keyed by (seed, step, micro-batch).

    The numbers are those that the device's default generator would have given after `MicroBatchSeed`, so one process
    and replicas in threads drop the same units. On the CPU each thread gets a generator of its own. On CUDA that cannot
    be: the operation behind dropout takes no generator. There the default generator is seeded, so the replicas that
    share a device must take turns.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = MicroBatchSeed(seed, device)
        self._mode: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if device.type == "cpu":
            self._mode = own = _OwnGenerator(torch.Generator())
            self._seed.generator = own.generator

    @contextlib.contextmanager
    def micro_batch(self, step: int, index: int) -> Iterator[None]:
        """Run one forward with the numbers of (step, micro-batch)."""
        self._seed(step, index)
        with self._mode:
            yield


class _OwnGenerator(TorchDispatchMode):
    """Hands `generator` to every random operation of this thread that was called without one."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = generator

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **given)
        if given.get("generator") is None:
            func, given["generator"] = _with_generator(func), self.generator
        return func(*args, **given)


def _with_generator(func: Any) -> Callable[..., Any]:
    """The overload of a random operation that takes a generator: its sibling of that name, or the operation itself."""
    packet, overload = func.overloadpacket, func.name().partition(".")[2]
    sibling = f"{overload}_generator" if overload else "generator"
    return getattr(packet, sibling) if sibling in packet.overloads() else func  # type: ignore[no-any-return]

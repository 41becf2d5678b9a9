"""Random numbers for replicas that run in threads: torch's default generator of a device is one for all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ddp_core.base.errors import UserError
from ddp_core.base.seeds import MicroBatchSeed
from ddp_core.base.torch_internals import TorchDispatchMode


class KeyedRandom:
    """Gives the random operations of one thread's forward numbers of their own, keyed by (seed, step, micro-batch).

    The numbers are those that the device's default generator gives after `MicroBatchSeed`, so one process and replicas
    in threads drop the same units. On the CPU each thread gets its own generator. CUDA's operation behind dropout takes
    no generator: there the default generator is seeded, so the replicas that share a device must take turns.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = MicroBatchSeed(seed, device)
        self._mode: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if device.type == "cpu":
            self._mode = own = _OwnGenerator(torch.Generator())
            self._seed.generator = own.generator
        self._is_checked = device.type != "cpu"

    @contextlib.contextmanager
    def micro_batch(self, step: int, index: int) -> Iterator[None]:
        """Run one forward with the numbers of (step, micro-batch)."""
        self._seed(step, index)
        with self._mode:
            yield

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Run the backward of that forward. Raises UserError, in the first one, for draws that cannot be repeated.

        What activation checkpointing computes again must draw the same numbers again, and it takes them from torch's
        default generator: on the CPU, that of all replicas together.
        """
        with contextlib.nullcontext() if self._is_checked else _NoDraws():  # type: ignore[no-untyped-call]
            yield
        self._is_checked = True


class _NoDraws(TorchDispatchMode):
    """Refuses every random operation of this thread."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise UserError(
                f"backward draws random numbers ({func}), as activation checkpointing does to compute dropout again; "
                "replicas in threads on the CPU cannot draw the same again: use --layout ddp"
            )
        return func(*args, **(kwargs or {}))


class _OwnGenerator(TorchDispatchMode):
    """Hands `generator` to every random operation that this thread calls without a generator."""

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
            # The overload that takes a generator has a name of its own, or is this one.
            packet, overload = func.overloadpacket, func.name().partition(".")[2]
            name = f"{overload}_generator" if overload else "generator"
            func = getattr(packet, name) if name in packet.overloads() else func
            given["generator"] = self.generator
        return func(*args, **given)

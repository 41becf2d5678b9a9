"""Random numbers for replicas that run in threads: torch's default generator of a device is one for all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ddp_core.base.own_generator import OwnGenerator
from ddp_core.base.seeds import MicroBatchSeed


class KeyedRandom:
    """Gives the random operations of one thread numbers of their own, keyed by (seed, step, micro-batch).

    The numbers are those that the default generators give after `MicroBatchSeed`, so one process and replicas in
    threads drop the same units. On the CPU each thread gets its own generator. CUDA's operation behind dropout takes no
    generator: there the default generator is seeded, so the replicas that share a device must take turns; and what they
    draw on the CPU with torch is not keyed, for that generator is one for the threads of all devices.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = MicroBatchSeed(seed, device)
        self._own: OwnGenerator | None = None
        if device.type == "cpu":
            self._own = OwnGenerator(torch.Generator())
            self._seed.generators = [self._own.generator]
        else:
            self._seed.generators = self._seed.generators[1:]
        self._has_run = False
        self._backward: contextlib.AbstractContextManager[object] = contextlib.nullcontext()

    @contextlib.contextmanager
    def micro_batch(self, step: int, index: int) -> Iterator[None]:
        """Run one forward with the numbers of (step, micro-batch)."""
        self._seed(step, index)
        with self._own or contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Run the backward of that forward with the numbers that follow.

        Few draw any; activation checkpointing does, to compute dropout again. Handing out the thread's own generator
        slows every operation down, so the first backward decides whether later ones need it.
        """
        if self._own is None or self._has_run:
            with self._backward:
                yield
            return
        self._own.has_drawn = False
        with self._own:
            yield
        self._has_run = True
        if self._own.has_drawn:
            self._backward = self._own

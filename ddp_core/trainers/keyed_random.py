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
        self._has_run = self._draws_in_backward = False

    @contextlib.contextmanager
    def micro_batch(self, step: int, index: int) -> Iterator[None]:
        """Run one forward with the numbers of (step, micro-batch)."""
        self._seed(step, index)
        if self._own is None:
            yield
            return
        self._own.has_told_state = False
        with self._own:
            yield

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Run the backward of that forward with the numbers that follow.

        Few draw any; activation checkpointing does, to compute dropout again. Handing out the thread's own generator
        slows every operation down. So it is done in the first backward, in all after one that has drawn, and where the
        forward has asked for the generator's state: a layer may be checkpointed in later micro-batches alone.
        """
        own = self._own
        if own is None or (self._has_run and not self._draws_in_backward and not own.has_told_state):
            yield
            return
        own.has_drawn = False
        with own:
            yield
        self._has_run, self._draws_in_backward = True, self._draws_in_backward or own.has_drawn

"""Random numbers computed from a key, without a generator whose state is carried along.

Nothing here depends on rank, worker or history: dropout is keyed by (seed, step, micro-batch), augmentation by
(seed, epoch, sample id). So a checkpoint needs no random state, and a resume needs no replay. SplitMix64 turns a key
into numbers.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from ddp_core.base.splitmix import MASK, STEP, finalise


def mix(*words: int) -> int:
    """A 64-bit key from integers; neighbouring integers give unrelated keys."""
    state = 0
    for word in words:
        state = finalise((state ^ word & MASK) + STEP & MASK)
    return state


def sample_uniforms(seed: int, epoch: int, ids: NDArray[np.int64], draws: int) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), keyed by (seed, epoch, sample id): float64 [len(ids), draws]."""
    step = np.uint64(STEP)
    per_sample = finalise((ids.astype(np.uint64) ^ np.uint64(mix(seed, epoch, 1))) + step)
    words = finalise(per_sample[:, None] + np.arange(1, draws + 1, dtype=np.uint64) * step)
    return (words >> 11).astype(np.float64) * 2.0**-53


class MicroBatchSeed:
    """Seeds torch's generator of one device for one micro-batch, keyed by (seed, step, micro-batch).

    `torch.manual_seed` would seed every device and costs about 100 microseconds; this costs a few.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed = seed
        if device.type == "cuda":
            torch.cuda.init()
            self.generator: torch.Generator = torch.cuda.default_generators[device.index or 0]
        else:
            self.generator = torch.default_generator

    def __call__(self, step: int, micro_batch: int) -> None:
        self.generator.manual_seed(mix(self.seed, step, micro_batch, 2) >> 1)


@contextlib.contextmanager
def generators_kept(device: torch.device | None = None) -> Iterator[None]:
    """Afterwards the global generators of Python, NumPy and torch, on the CPU and on a CUDA `device`, are as before."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device is not None and device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)

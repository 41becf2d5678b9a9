"""Random numbers keyed by position instead of carried along.

Nothing here depends on rank, worker or history: dropout is keyed by (seed, step, micro-batch), augmentation by
(seed, epoch, sample id). So a checkpoint needs no random state and a resume needs no replay. The mixing function is
splitmix64's finaliser (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(*words: int) -> int:
    """A 64-bit key from integers; neighbouring inputs give unrelated keys."""
    state = 0
    for word in words:
        state = (state ^ (word & _MASK)) + _GOLDEN & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


def _mix_array(words: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    words = words + np.uint64(_GOLDEN)
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)


def sample_uniforms(
    seed: int, epoch: int, ids: np.ndarray[Any, np.dtype[np.int64]], draws: int
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Uniform numbers in [0, 1) for each sample, keyed by (seed, epoch, sample id): float64 of shape [len(ids),
    draws].
    """
    per_sample = _mix_array(ids.astype(np.uint64) ^ np.uint64(mix(seed, epoch, 1)))
    words = _mix_array(per_sample[:, None] + np.arange(draws, dtype=np.uint64) * np.uint64(_GOLDEN))
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


class MicroBatchSeed:
    """Seeds torch's generator of one device for one micro-batch, keyed by (seed, step, micro-batch).

    `torch.manual_seed` would seed every device and costs about 100 microseconds; this costs about one.
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

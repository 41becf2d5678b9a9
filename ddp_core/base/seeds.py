"""What all ranks compute alike from a few numbers: random numbers from a key, and which rank has which micro-batches.

No generator's state is carried along, and no random number depends on rank, worker or history: what a micro-batch draws
is keyed by (seed, step, micro-batch), what an update draws by (seed, step), what an evaluation draws by (seed, epoch,
batch), augmentation by (seed, epoch, sample id). So a checkpoint needs no random state, and a resume needs no replay.

SplitMix64, a hash of 64-bit numbers that gives unrelated results for neighbouring numbers, turns a key into numbers
(G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; the two factors and three
shifts are D. Stafford's "mix 13", 2011). The generator's n-th output from state `key` is `finalise(key + n * STEP)`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ddp_core.base.keyed_draws import key_draws, numpy_words, without_key

if TYPE_CHECKING:  # the order of the samples is computed without torch
    import torch

STEP = 0x9E3779B97F4A7C15
"""How much SplitMix64's state grows per output: 2**64 over the golden ratio, made odd."""
FIRST_FACTOR, SECOND_FACTOR = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 2**64 - 1

_Words = TypeVar("_Words", int, NDArray[np.uint64])


def finalise(words: _Words) -> _Words:
    """SplitMix64's output, a bijection on 64 bits: of an int below 2**64 or of each number of a uint64 array."""
    mixed: Any = words  # mypy thinks that uint64 with a Python integer is signed; numpy keeps it unsigned
    mixed = (mixed ^ mixed >> 30) * FIRST_FACTOR & _MASK
    mixed = (mixed ^ mixed >> 27) * SECOND_FACTOR & _MASK
    result: _Words = mixed ^ mixed >> 31
    return result


def mix(*words: int) -> int:
    """A 64-bit key from integers; neighbouring integers give unrelated keys."""
    state = 0
    for word in words:
        state = finalise((state ^ word & _MASK) + STEP & _MASK)
    return state


def share_of(count: int, rank: int, parts: int | Sequence[int]) -> range:
    """The numbers below `count` that belong to `rank`: contiguous, in rank order.

    `parts`: the number of ranks, whose shares then differ by one at most; or one number for each rank, as (3, 1): then
    rank 0 has about three of four. A rank has an empty range only where `count` is below the number of ranks.
    """
    if isinstance(parts, int):
        return range(rank * count // parts, (rank + 1) * count // parts)
    ends, each = [0], int(count >= len(parts))
    for after, upto in zip(reversed(range(len(parts))), accumulate(parts), strict=True):
        ends.append(max(ends[-1] + each, min(round(count * upto / sum(parts)), count - each * after)))
    return range(*ends[rank : rank + 2])


def sample_uniforms(seed: int, epoch: int, ids: NDArray[np.int64], draws: int) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), keyed by (seed, epoch, sample id): float64 [len(ids), draws]."""
    step = np.uint64(STEP)
    per_sample = finalise((ids.astype(np.uint64) ^ np.uint64(mix(seed, epoch, 1))) + step)
    words = finalise(per_sample[:, None] + np.arange(1, draws + 1, dtype=np.uint64) * step)
    return (words >> 11).astype(np.float64) * 2.0**-53


def micro_batch_words(seed: int, step: int, micro_batch: int) -> tuple[int, ...]:
    """The key, for `mix`, of what is drawn while the samples of a micro-batch are made and put together."""
    return seed, step, micro_batch, 4


def dealt_words(seed: int, epoch: int, number: int) -> tuple[int, ...]:
    """That key in somebody else's loop, which counts the micro-batches of an epoch, and knows no step."""
    return seed, epoch, number, 9


class MicroBatchSeed:
    """Seeds the generators of Python, numpy and torch for one micro-batch, and for what comes between micro-batches.

    Of torch's generators those of the CPU and of one device: `torch.manual_seed` would seed every device and costs
    about 100 microseconds; this costs a few. Python's and numpy's are seeded where they are watched (`keyed_draws`), or
    `at_once`, which takes ten more: for a process of somebody else, whose modules have long taken functions by name.
    """

    def __init__(self, seed: int, device: torch.device, at_once: bool = False) -> None:
        import torch

        self.seed = seed
        self._at_once = at_once
        self.generators: list[torch.Generator] = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()
            self.generators.append(torch.cuda.default_generators[device.index or 0])

    def __call__(self, step: int, micro_batch: int) -> None:
        """For forward and backward of a micro-batch."""
        self.begin(self.seed, step, micro_batch, 2)

    def update(self, step: int) -> None:
        """For the update of the weights, and whatever is called until the next micro-batch."""
        self.begin(self.seed, step, 5)

    def after_evaluation(self, epoch: int) -> None:
        """For what is called between an evaluation, in which every rank has batches of its own, and the next step."""
        self.begin(self.seed, epoch, 7)

    def begin(self, *words: int) -> None:
        """For what is keyed by these numbers."""
        seed = mix(*words) >> 1
        for generator in self.generators:
            generator.manual_seed(seed)
        if self._at_once:
            random.seed(seed)
            np.random.seed(numpy_words(seed))
        else:
            key_draws(seed)


class EvaluationSeed(NamedTuple):
    """Seeds the same generators for the batches of one evaluation."""

    run: MicroBatchSeed
    epoch: int

    def key(self, batch: int) -> tuple[int, ...]:
        """The key, for `mix`, of what is drawn for a batch."""
        return self.run.seed, self.epoch, batch, 6

    def __call__(self, batch: int) -> None:
        self.run.begin(*self.key(batch))


@contextlib.contextmanager
def generators_kept(device: torch.device | None = None) -> Iterator[None]:
    """After this block the global generators of Python, NumPy and torch, on the CPU and `device`, are as before it."""
    import torch

    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device is not None and device.type == "cuda" else []):
        try:
            with without_key():
                yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)

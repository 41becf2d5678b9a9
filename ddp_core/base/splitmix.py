"""SplitMix64: a hash of 64-bit numbers that gives unrelated results for neighbouring numbers.

G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; the two multipliers and
three shifts are D. Stafford's "mix 13", 2011. The generator's n-th output from state `key` is
`finalise(key + n * STEP)`.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

MASK = 2**64 - 1
STEP = 0x9E3779B97F4A7C15
"""How much the generator's state grows per output: 2**64 over the golden ratio, made odd."""
FIRST_FACTOR, SECOND_FACTOR = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

Words = TypeVar("Words", int, NDArray[np.uint64])


def finalise(words: Words) -> Words:
    """The output function, a bijection on 64 bits: of an integer in [0, 2**64), or of each number of a uint64 array."""
    mixed: Any = words  # mypy thinks that uint64 with a Python integer is signed; numpy keeps it unsigned
    mixed = (mixed ^ mixed >> 30) * FIRST_FACTOR & MASK
    mixed = (mixed ^ mixed >> 27) * SECOND_FACTOR & MASK
    result: Words = mixed ^ mixed >> 31
    return result

"""The order of the samples: a pure function of (seed, epoch, position), on any layout, without a list in memory.

`torch.utils.data.DistributedSampler` builds the permutation of the whole data set as a Python list, on every rank, at
the start of every epoch; it pads the last round with samples already seen (or drops it), and it cannot resume inside
an epoch. Here the order is a keyed bijection on [0, length), computed only for the positions that are asked for.

Algorithm. Let b be the number of bits of length - 1. A position is cut into a left half of b // 2 bits and a right
half of the remaining b - b // 2, and eight Feistel rounds change the halves in turn:

    left  ^= F(right, key 0);   right ^= F(left, key 1);   left ^= F(right, key 2);   ...

Whatever F is, each round is its own inverse, so the network is a bijection on [0, 2**b). Where it leaves [0, length)
it is applied again until it comes back ("cycle walking"), which makes it a bijection on [0, length): fewer than two
passes per position on average, as 2**b < 2 * length. F(x, key) is the middle of a well-tested integer hash: xor with
the key, multiply, xor-shift, multiply, and the top bits. The eight keys are the 512 bits of BLAKE2b over (length,
seed, epoch), so neighbouring seeds and epochs have nothing in common. Up to 2**14 samples another method of Black and
Rogaway (below) is used, the "prefix cipher": hash every position to 64 bits and rank the hashes. It costs one small
sort per epoch, and its orders do not show the network's structure, which would be visible where a half has only a few
bits.

Statistics (`python -m benchmarks.sampler`): chi-square of id against position,
of neighbours in the order at several distances, and of equal positions in neighbouring epochs and seeds, shows no
departure from uniform. With fewer rounds it does: five fail at 2**15 samples, four at every length tried; six pass,
and eight leave a margin. All short permutations come equally often. This is a shuffle, not a cipher: keep no secret
with it.

Sources. M. Luby, C. Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", SIAM J.
Computing 17(2), 1988 (the rounds); J. Black, P. Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002 (prefix
cipher, cycle walking); C. Wellons, "Prospecting for hash functions", 2018 (lowbias32, the 32-bit F); D. Stafford,
"Better bit mixing", 2011, mix 13, as in G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014 (SplitMix64: the 64-bit F, the short orders).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ddp_core.base.seeds import FIRST_FACTOR, SECOND_FACTOR, STEP, finalise

Ids: TypeAlias = NDArray[np.int64]
"""Ids of samples: an int64 array of one dimension."""
_Lanes: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""Positions or ids as unsigned integers of 32 or 64 bits, on which the Feistel network computes."""

BLOCK = 1 << 14
"""Positions that are computed at a time: 16384, whose four arrays of 64 KiB stay in a core's second-level cache."""
# If the order is ever changed, a saved position means other samples: raise this number then.
ORDER_FORMAT = 1

_ROUNDS = 8
# By the bits of a lane, what F is made of: first multiplier, shift, second multiplier. The first and the last shift of
# the published hashes are left out: a half is too narrow for them to change it.
_MIXERS: dict[int, tuple[int, int, int]] = {
    32: (0x7FEB352D, 15, 0x846CA68B),
    64: (FIRST_FACTOR, 27, SECOND_FACTOR),
}


class Permutation:
    """A keyed bijection on [0, length), computed for the positions asked for and no others.

    `length`: 0 to 2**63 - 1. `key`: any integers; the same (length, key) give the same permutation on every machine.
    Raises ValueError for a length out of range. Source: the module's docstring.
    """

    def __init__(self, length: int, key: Sequence[int]) -> None:
        if not 0 <= length < 2**63:
            raise ValueError(f"length must be in [0, 2**63), not {length}")
        self.length = length
        text = " ".join(str(int(number)) for number in (length, *key))
        digest = hashlib.blake2b(text.encode(), digest_size=8 * _ROUNDS, person=b"ddp_core.order").digest()
        words = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
        self._table: Ids | None = None
        self._lane: type[np.uint32] | type[np.uint64] = np.uint32 if length < 2**32 else np.uint64
        if length <= BLOCK:
            # The prefix cipher: SplitMix64's first outputs from the state words[0], no two of which are equal.
            hashes = finalise(np.arange(1, length + 1, dtype=np.uint64) * STEP + words[0])
            self._table = np.argsort(hashes)
            return
        bits = (length - 1).bit_length()
        lane_bits = 32 if self._lane is np.uint32 else 64
        first, shift, second = _MIXERS[lane_bits]
        self._mixer = (self._lane(first), self._lane(shift), self._lane(second))
        self._right_bits = self._lane(bits - bits // 2)
        self._right_mask = self._lane((1 << (bits - bits // 2)) - 1)
        # How far a hash is shifted right, so that it has as many bits as the half that it changes.
        to_left, to_right = self._lane(lane_bits - bits // 2), self._lane(lane_bits - (bits - bits // 2))
        self._rounds = [
            (key, to_right if number % 2 else to_left) for number, key in enumerate(words.astype(self._lane))
        ]

    def __len__(self) -> int:
        return self.length

    def __call__(self, positions: range | Sequence[int] | NDArray[Any]) -> Ids:
        """The ids at `positions`: int64, of the same length. Raises IndexError for a position outside [0, length)."""
        if not isinstance(positions, range):
            positions = np.asarray(positions, dtype=np.int64)
        if len(positions):
            ends = (positions[0], positions[-1]) if isinstance(positions, range) else (positions.min(), positions.max())
            if min(ends) < 0 or max(ends) >= self.length:
                raise IndexError(f"positions must be in [0, {self.length})")
        result = np.empty(len(positions), dtype=np.int64)
        for begin in range(0, len(positions), BLOCK):
            part = positions[begin : begin + BLOCK]
            if isinstance(part, range):
                part = np.arange(part.start, part.stop, part.step, dtype=np.int64)
            result[begin : begin + len(part)] = self._walk(part) if self._table is None else self._table[part]
        return result

    def _walk(self, positions: Ids) -> _Lanes:
        """Apply the network once, then again to all values outside [0, length) until none is left."""
        lanes = self._network(positions.astype(self._lane))
        outside = np.flatnonzero(lanes >= self.length)
        while len(outside):
            again = self._network(lanes[outside])
            lanes[outside] = again
            outside = outside[again >= self.length]
        return lanes

    def _network(self, lanes: _Lanes) -> _Lanes:
        """One pass of the Feistel network, a bijection on [0, 2**bits); `lanes` is overwritten and returned."""
        first, shift, second = self._mixer
        halves = [lanes >> self._right_bits, lanes & self._right_mask]
        # After the cut into halves `lanes` is free, and serves as the buffer for shifted values.
        mixed, shifted = np.empty_like(lanes), lanes
        for number, (key, top) in enumerate(self._rounds):
            changed, source = halves[number % 2], halves[1 - number % 2]
            np.bitwise_xor(source, key, out=mixed)
            np.multiply(mixed, first, out=mixed)
            np.right_shift(mixed, shift, out=shifted)
            np.bitwise_xor(mixed, shifted, out=mixed)
            np.multiply(mixed, second, out=mixed)
            np.right_shift(mixed, top, out=mixed)
            np.bitwise_xor(changed, mixed, out=changed)
        np.left_shift(halves[0], self._right_bits, out=lanes)
        np.bitwise_or(lanes, halves[1], out=lanes)
        return lanes


class GlobalOrder:
    """The order of the global sample sequence, the same on every layout.

    `length`: samples of the data set. With `shuffle` false the order is 0, 1, 2, ... in every epoch. For a loop that
    asks for a few ids at a time, a block of ids is computed ahead (128 KiB at most).
    """

    def __init__(self, length: int, seed: int, shuffle: bool = True) -> None:
        self.length = length
        self.seed = seed
        self.shuffle = shuffle
        self._permutation: tuple[int, Permutation] | None = None
        self._ahead: tuple[int, int, int, Ids] = (-1, 0, 0, np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        return self.length

    def permutation(self, epoch: int) -> Permutation:
        """The permutation that shuffles `epoch`: it takes a position to an id."""
        kept = self._permutation
        if kept is None or kept[0] != epoch:
            kept = self._permutation = (epoch, Permutation(self.length, (self.seed, epoch)))
        return kept[1]

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """The ids at global positions [start, stop) of `epoch`: int64 [stop - start], the caller's own copy.

        Raises IndexError unless 0 <= start <= stop <= length.
        """
        cached_epoch, cached_start, cached_stop, block = self._ahead
        if epoch == cached_epoch and cached_start <= start <= stop <= cached_stop:
            return block[start - cached_start : stop - cached_start].copy()
        if not 0 <= start <= stop <= self.length:
            raise IndexError(f"positions {start} to {stop} are not in [0, {self.length}]")
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        # Ids are computed ahead for calls that move on a little; the first call and a jump get just what they ask for.
        forward = epoch == cached_epoch and cached_start <= start <= cached_stop + BLOCK
        if stop - start >= BLOCK:
            return self.permutation(epoch)(range(start, stop))
        end = min(start + BLOCK, self.length) if forward else stop
        block = self.permutation(epoch)(range(start, end))
        self._ahead = (epoch, start, end, block)
        return block[: stop - start].copy()

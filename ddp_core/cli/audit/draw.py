"""Which segments of a run are trained again, and what that proves of the others."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from math import comb
from typing import NamedTuple

_SURE = 0.05
"""The probability of passing below which a claim counts as shown."""


class Segment(NamedTuple):
    """Steps `start` + 1 to `stop`, the state before and after which is kept."""

    number: int
    """Counted from 1."""
    start: int
    stop: int


def segments_of(kept: Sequence[int]) -> list[Segment]:
    """The segments of a run that has kept the states after these steps, the last of which is its end."""
    return [Segment(number, *ends) for number, ends in enumerate(pairwise([0, *kept]), 1)]


def drawn(segments: Sequence[Segment], count: int, seed: int, record: str) -> list[Segment]:
    """So many of the segments, each set of them as likely as any other, in their sequence.

    They follow from the auditor's seed and the SHA-256 of the record, which tells nothing of them before the seed is
    known.
    """

    def lot(segment: Segment) -> bytes:
        return hashlib.sha256(f"{seed} {record} {segment.number}".encode()).digest()

    return sorted(sorted(segments, key=lot)[:count])


def passing(segments: int, forged: int, draws: int) -> float:
    """The probability that none of `draws` of the segments is a forged one: C(S - F, k) / C(S, k)."""
    return comb(segments - forged, draws) / comb(segments, draws)


def needed_draws(segments: int, forged: int) -> int:
    """The fewest draws that a run with so many forged segments passes with a probability of at most 5 %."""
    return next(draws for draws in range(1, segments + 1) if passing(segments, forged, draws) <= _SURE)


def claims(segments: int) -> list[int]:
    """The numbers of forged segments that a report tells of: one, a tenth and a half of them."""
    return sorted({1, -(-segments // 10), -(-segments // 2)})

"""What a check, a rehearsal or a witness has found, and who is asked for a witness."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from ddp_core.base.errors import UserError

Sums = Mapping[str, str]
"""A checksum for each tensor and each number of the state, by its dotted name."""


class Finding(UserError):
    """What a check of all ranks has found: raised on each of them alike, so that all may go on together."""


class Testimony(NamedTuple):
    """What came of a rehearsal or a witness: whether steps that were trained again have the same bits."""

    said: str
    """In words: that the bits are the same, which others there are, or why nothing was found out."""
    differs: bool = False
    seconds: float = 0.0
    """How long it took."""


class Witness(Protocol):
    """Has steps of this run trained again elsewhere; used on rank 0."""

    def ask(self, step: int, noted: Mapping[int, Sums]) -> None:
        """Begin to repeat the steps after the checkpoint of `step`, which have made `noted` of the state."""

    def answer(self, seconds: float) -> Testimony | None:
        """What was found, once that is known within so many seconds."""

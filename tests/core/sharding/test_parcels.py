"""Parcels of gradients: sent once in each pass, in one sequence, as soon as they and those before are complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_core.sharding.parcels import Parcel, Turns


class Letter(Parcel):
    """A parcel without gradients."""

    def take(self) -> tuple[Any, list[bool]]:
        return None, []

    def flattened(self, taken: Any) -> Tensor:
        return torch.empty(0)

    def give(self, total: Tensor, used: Sequence[bool]) -> None: ...

    def discard(self) -> None: ...

    def remove_hooks(self) -> None: ...

    def arrives(self) -> None:
        """All its gradients are there."""
        self.is_ready = True
        self.became_ready()


def test_parcels_are_sent_in_their_sequence_as_soon_as_they_can_be() -> None:
    letters, sent = [Letter() for _ in range(4)], list[int]()
    turns = Turns(letters, sent.append)
    letters[0].arrives()
    assert sent == [], "before the first pass"
    for _ in range(2):
        sent.clear()
        turns.begin()
        letters[1].arrives()
        assert sent == []
        letters[0].arrives()
        assert sent == [0, 1]
        assert [letter.is_sent for letter in letters] == [True, True, False, False]
        letters[2].arrives()
        assert sent == [0, 1, 2]
        turns.send_rest()
        assert sent == [0, 1, 2, 3]
        assert all(letter.is_sent for letter in letters)
        turns.send_rest()
        assert sent == [0, 1, 2, 3]


def test_a_parcel_that_could_not_be_sent_is_not_sent_again() -> None:
    sent = []

    def send(number: int) -> None:
        sent.append(number)
        if number == 1:
            raise RuntimeError("on purpose")

    letters = [Letter() for _ in range(3)]
    turns = Turns(letters, send)
    turns.begin()
    with pytest.raises(RuntimeError, match="on purpose"):
        turns.send_rest()
    turns.send_rest()
    assert sent == [0, 1, 2]

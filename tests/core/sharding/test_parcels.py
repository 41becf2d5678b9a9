"""Parcels of gradients: sent once in each pass, in one sequence, as soon as they and those before are complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_core.reduction.flat import Gradients
from ddp_core.sharding.parcels import Parcel, Turns, group_parcels
from ddp_core.sharding.shards import Shards
from tests.support.wording import refusing


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


def test_a_group_is_complete_with_its_last_gradient_and_takes_no_others() -> None:
    layers = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1), nn.Linear(1, 1, dtype=torch.float64))
    gradients = Gradients(layers)
    shards = Shards(gradients.parameters, range(2))
    last, first = parcels = group_parcels(shards, 1, gradients)
    assert [parcel.group for parcel in parcels] == shards.groups[::-1]
    assert [(parcel.like.numel(), parcel.like.dtype) for parcel in parcels] == [(0, torch.float64), (0, torch.float32)]
    seen = []

    def became_ready() -> None:
        seen.append([each.grad is not None for each in gradients.parameters])

    for parcel in parcels:
        parcel.became_ready = became_ready
    layers[2](layers[1](layers[0](torch.ones(1, 2))).double()).sum().backward()
    assert seen == [], "none is open"
    gradients.take()
    for parcel in parcels:
        parcel.open()
    layers[2](layers[1](layers[0](torch.ones(1, 2))).double()).sum().backward()
    assert last.is_ready
    assert first.is_ready
    assert [sum(each) for each in seen] == [2, 6]
    taken, used = last.take()
    assert len(taken) == 2
    assert used == [True, True]
    assert [each.grad is not None for each in gradients.parameters] == [True] * 4 + [False] * 2
    parcels[0].remove_hooks()
    parcels[1].remove_hooks()
    layers[0](torch.ones(1, 2)).sum().backward()
    assert len(seen) == 2


def test_a_gradient_that_is_made_again_after_it_was_sent_is_refused() -> None:
    layer = nn.Linear(2, 3)
    gradients = Gradients(layer)
    (parcel,) = group_parcels(Shards(gradients.parameters, range(2)), 1, gradients)
    turns = Turns([parcel], lambda _: None)
    turns.begin()
    parcel.open()
    layer(torch.ones(1, 2)).sum().backward()
    assert parcel.is_sent
    with refusing(RuntimeError):
        layer(torch.ones(1, 2)).sum().backward()

"""Makes operations and collectives that tapes tell of once more, in one process in the place of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ddp_core.base.errors import UserError
from ddp_lab.diagnose.tape import Constant, Content, Exchange, Operation, Place, Whole, mapped

APART = "its ranks do not meet at the same exchange"


class Made:
    """What one of the ranks has made so far, in storages of this process by their numbers on the tape."""

    def __init__(self) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.given: dict[int, list[Tensor]] = {}
        """By the number of an exchange, what this rank has given to it."""

    def at(self, place: Place) -> Tensor:
        """The tensor at a place."""
        empty = torch.empty(0, dtype=place.dtype)
        return empty.set_(self.storages[place.storage], place.offset, place.size, place.stride)

    def give(self, entry: Exchange) -> None:
        """Keep what this rank gives to an exchange, as it is now."""
        self.given[entry.number] = [self.at(place).clone() for place in entry.given]

    def fill(self, entry: Content) -> None:
        """Write bytes into a storage."""
        content = torch.frombuffer(bytearray(entry.content), dtype=torch.uint8) if entry.content else torch.empty(0)
        if (known := self.storages.get(entry.storage)) is not None:
            known.copy_(content.untyped_storage())
        else:
            # A fresh one, aligned as torch aligns its own: another alignment may mean another kernel.
            self.storages[entry.storage] = content.clone().untyped_storage()

    def make(self, entry: Operation, draws: bool) -> None:
        """Make an operation, which `draws` the same random numbers as on the tape."""
        if entry.generator is not None and draws:
            set_generator(entry.generator)
        words, named = mapped(self._given_as, entry.given)
        with torch.no_grad():
            result = operation(entry.name)(*words, **named)
        for made, place in zip(leaves(result), leaves(entry.made), strict=True):
            if isinstance(place, Place):
                self.storages.setdefault(place.storage, made.untyped_storage())

    def _given_as(self, each: object) -> object:
        if isinstance(each, Place):
            return self.at(each)
        if isinstance(each, Whole):
            return self.storages[each.storage]
        return getattr(torch, each.name) if isinstance(each, Constant) else each


def set_generator(state: bytes) -> None:
    """Put torch's generator into this state."""
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def exchange(at: Sequence[Exchange], ranks: Sequence[Made]) -> None:
    """Give each rank what the collective makes of all ranks' tensors: sums are added up in the ranks' order.

    Raises UserError where they do not meet at the same collective.
    """
    first = at[0]
    if len({(each.kind, each.operation, len(each.received)) for each in at}) > 1:
        raise UserError(APART)
    if first.kind == "scatter_":
        for each, rank, part in zip(at, ranks, ranks[first.root].given[at[first.root].number], strict=True):
            rank.at(each.received[0][0]).copy_(part)
        return
    for index in range(len(first.given)):
        parts = [rank.given[each.number][index] for each, rank in zip(at, ranks, strict=True)]
        match first.kind:
            case "allreduce_":
                made = [_reduced(parts, first.operation)]
            case "broadcast_":
                made = [parts[first.root]]
            case "allgather_":
                made = parts
            case _:
                made = [torch.cat([part.reshape(-1) for part in parts])]
        for each, rank in zip(at, ranks, strict=True):
            for place, tensor in zip(each.received[index], made, strict=True):
                rank.at(place).copy_(tensor.reshape(place.size))


def _reduced(parts: Sequence[Tensor], operation: str) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        match operation:
            case "SUM" | "AVG":
                total = total + part
            case "PRODUCT":
                total = total * part
            case "MAX":
                total = torch.maximum(total, part)
            case "MIN":
                total = torch.minimum(total, part)
            case _:
                raise UserError(f"it reduces by {operation}")
    return total / len(parts) if operation == "AVG" else total


def leaves(tree: Any) -> list[Any]:
    """The leaves of a tree of tuples, lists and dicts, such as Places."""
    found: list[Any] = []
    mapped(found.append, tree)
    return found


@cache
def operation(name: str) -> Any:
    """The operation of this name, such as `aten.mul.Tensor`. Raises UserError where this process has none."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise UserError(f"it uses {name}, which is not torch's own")
    return found

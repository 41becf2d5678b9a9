"""Makes operations and collectives that tapes tell of once more, in one process in the place of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from ddp_core.base.errors import UserError
from ddp_lab.diagnose.tape import Exchange, Place, mapped

APART = "its ranks do not meet at the same exchange"


class Made(Protocol):
    """What one of the ranks has made so far."""

    given: dict[int, list[Tensor]]
    """By the number of an exchange, what this rank has given to it."""

    def at(self, place: Place) -> Tensor:
        """The tensor at a place."""


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

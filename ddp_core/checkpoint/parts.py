"""A checkpoint in parts: what the data file of each rank holds of a state, and the whole state from all these files.

The first rank's file holds the state with None in the place of each tensor that is cut, and the strides of that tensor.
Every rank's file holds that rank's pieces of the tensors that are cut:

    {"state": …, "strides": {name: [strides]}, "tied": {other name: name}, "pieces": {name: {first element: values}}}

Names are dotted, as in the manifest's `shapes`. Elements are counted in the sequence in which they lie in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddp_core.checkpoint.manifest import Damaged
from ddp_core.checkpoint.state import Shapes, StateTensors, described, replaced


@dataclass(frozen=True, eq=False)
class CutTensor:
    """A tensor of a state of which this rank has pieces, each a range of its elements.

    The pieces of all ranks are all elements, each of them once. The same object under two names is a tied tensor.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the whole tensor."""
    strides: tuple[int, ...]
    """Of the whole tensor, in elements; it has no gaps in memory."""
    pieces: Mapping[int, Tensor]
    """The values of each piece, in one dimension, by the number of its first element in memory."""


def part_of(state: Any, is_first: bool) -> tuple[dict[str, Any], Shapes]:
    """What a rank's data file holds of a state, and the shapes of the whole state's tensors.

    What is not cut is the same on all ranks; the first one writes it. Raises what `StateTensors` raises.
    """
    cuts: dict[str, CutTensor] = {}
    tied: dict[str, str] = {}
    shapes: Shapes = {}
    first_names: dict[int, str] = {}

    def take(leaf: Any, name: str) -> Any:
        if not isinstance(leaf, CutTensor):
            return leaf
        if name in shapes:
            raise ValueError(f"two tensors of the state are called {name!r}")
        shapes[name] = described(leaf)
        first = first_names.setdefault(id(leaf), name)
        if first == name:
            cuts[name] = leaf
        else:
            tied[name] = first
        return None

    rest = replaced(state, take)
    pieces = {name: dict(cut.pieces) for name, cut in cuts.items() if cut.pieces}
    if not is_first:
        return {"pieces": pieces}, shapes
    strides = {name: list(cut.strides) for name, cut in cuts.items()}
    others = StateTensors(rest).shapes
    if both := shapes.keys() & others.keys():
        raise ValueError(f"two tensors of the state are called {min(both)!r}")
    return {"state": rest, "strides": strides, "tied": tied, "pieces": pieces}, shapes | others


def put_together(contents: Iterable[Any], shapes: Shapes) -> Any:
    """The whole state, from the contents of the data files of all ranks, by rank.

    Raises Damaged unless they have every element of each tensor that is cut, once.
    """
    wholes: dict[str, _Whole] = {}
    first: dict[str, Any] = {}
    for content in contents:
        first = first or {name: content[name] for name in ("state", "strides", "tied")}
        for name, pieces in content["pieces"].items():
            if name not in first["strides"] or name not in shapes:
                raise Damaged(f"a part has pieces of {name}, which the first part does not know")
            for start, values in pieces.items():
                if name not in wholes:
                    wholes[name] = _Whole(name, shapes[name][1], first["strides"][name], values)
                wholes[name].put(start, values)
    for name in first["strides"]:
        if name not in wholes:
            raise Damaged(f"no part has pieces of {name}")
        wholes[name].require_all()
    names = {name: name for name in first["strides"]} | first["tied"]
    return replaced(first["state"], lambda leaf, name: wholes[names[name]].tensor if name in names else leaf)


class _Whole:
    """A tensor that is put together from pieces; `like` has its dtype, and lies on the device that it shall be on."""

    def __init__(self, name: str, sizes: Sequence[int], strides: Sequence[int], like: Tensor) -> None:
        self._name = name
        self.tensor = torch.empty_strided(sizes, strides, dtype=like.dtype, device=like.device)
        count = self.tensor.untyped_storage().nbytes() // self.tensor.element_size()
        if count != self.tensor.numel():
            raise Damaged(f"{name} with the strides {strides} has gaps in memory")
        self._flat = self.tensor.as_strided((count,), (1,))
        self._found: list[tuple[int, int]] = []

    def put(self, start: int, values: Tensor) -> None:
        """Copy the values of a piece, whose first element has the number `start`, to their place."""
        stop = start + values.numel()
        if start < 0 or stop > self._flat.numel() or values.dtype != self._flat.dtype:
            raise Damaged(f"{self._name} has no elements {start} to {stop} of {values.dtype}")
        self._flat[start:stop] = values
        self._found.append((start, stop))

    def require_all(self) -> None:
        """Raise Damaged unless each element has been put to its place once."""
        reached = 0
        for start, stop in sorted(self._found):
            if start != reached:
                raise Damaged(f"the parts do not have element {min(start, reached)} of {self._name} once")
            reached = stop
        if reached != self._flat.numel():
            raise Damaged(f"no part has the elements of {self._name} from {reached} on")

"""A checkpoint in parts: what the data file of each rank holds of a state, and the whole state from all these files.

The first rank's file holds the state with None in the place of each tensor that is cut, and the strides of that tensor.
Every rank's file holds that rank's pieces of the tensors that are cut:

    {"state": …, "strides": {name: [strides]}, "tied": {other name: name}, "pieces": {name: {first element: values}}}

Names are dotted, as in the manifest's `shapes`. Elements are counted in the sequence in which they lie in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddp_core.checkpoint.manifest import Damaged
from ddp_core.checkpoint.state import Shapes, StateTensors, describe, described, replaced


@dataclass(frozen=True, eq=False)
class CutTensor:
    """A tensor of a state in pieces, ranges of its elements: this rank's pieces in a save, those of all in a load.

    The pieces of all ranks are all elements, each of them once. The same object under two names is a tied tensor.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    strides: tuple[int, ...]
    """The strides of the whole tensor, in elements; it has no gaps in memory."""
    pieces: Mapping[int, Tensor]
    """The values of each piece, in one dimension, by the number of its first element in memory."""

    def elements(self, start: int, stop: int) -> Tensor:
        """Elements `start` … `stop` - 1, as they lie in memory: a copy, which reads nothing else of the pieces."""
        device = next((values.device for values in self.pieces.values()), None)
        out = torch.empty(stop - start, dtype=self.dtype, device=device)
        for begin, values in self.pieces.items():
            first, last = max(start, begin), min(stop, begin + values.numel())
            if first < last:
                out[first - start : last - start] = values[first - begin : last - begin]
        return out

    def whole(self) -> Tensor:
        """The whole tensor."""
        flat = self.elements(0, math.prod(self.shape))
        return flat.as_strided(self.shape, self.strides)


def whole_tensors(state: Any) -> Any:
    """The state with the whole tensor in the place of each CutTensor; tied tensors stay tied."""
    wholes: dict[int, Tensor] = {}

    def whole(leaf: Any, _: str) -> Any:
        if not isinstance(leaf, CutTensor):
            return leaf
        if id(leaf) not in wholes:
            wholes[id(leaf)] = leaf.whole()
        return wholes[id(leaf)]

    return replaced(state, whole)


def shapes_of(state: Any) -> Shapes:
    """What `describe` returns for the state with whole tensors."""
    cuts: Shapes = {}

    def note(leaf: Any, name: str) -> Any:
        if not isinstance(leaf, CutTensor):
            return leaf
        cuts[name] = described(leaf)
        return None

    return describe(replaced(state, note)) | cuts


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
    """The state with all pieces of each tensor that is cut, from the contents of the data files of all ranks, by rank.

    Raises Damaged unless they have every element of each such tensor once.
    """
    pieces: dict[str, list[tuple[int, Tensor]]] = {}
    first: dict[str, Any] = {}
    for content in contents:
        first = first or {name: content[name] for name in ("state", "strides", "tied")}
        for name, found in content["pieces"].items():
            if name not in first["strides"] or name not in shapes:
                raise Damaged(f"a part has pieces of {name}, which the first part does not know")
            pieces.setdefault(name, []).extend(found.items())
    cuts = {}
    for name, strides in first["strides"].items():
        if not pieces.get(name):
            raise Damaged(f"no part has pieces of {name}")
        cuts[name] = _complete(name, shapes[name][1], strides, pieces[name])
    cuts |= {name: cuts[other] for name, other in first["tied"].items()}
    return replaced(first["state"], lambda leaf, name: cuts.get(name, leaf))


def _complete(
    name: str, shape: Sequence[int], strides: Sequence[int], pieces: Sequence[tuple[int, Tensor]]
) -> CutTensor:
    """A tensor from its pieces. Raises Damaged unless these have each of its elements once, in one dtype."""
    count, dtype = math.prod(shape), pieces[0][1].dtype
    memory = torch.empty_strided(shape, strides, dtype=dtype, device="meta").untyped_storage()
    if memory.nbytes() != count * dtype.itemsize:
        raise Damaged(f"{name} with the strides {strides} has gaps in memory")
    reached = 0
    for start, values in sorted(pieces, key=lambda piece: (piece[0], piece[1].numel())):
        stop = start + values.numel()
        if values.dtype != dtype:
            raise Damaged(f"{name} has no elements {start} to {stop} of {values.dtype}")
        if start != reached:
            raise Damaged(f"the parts do not have element {min(start, reached)} of {name} once")
        reached = stop
    if reached != count:
        raise Damaged(f"the parts have {reached} elements of {name}, which has {count}")
    return CutTensor(dtype, tuple(shape), tuple(strides), dict(pieces))

"""Trees of tensors, of which micro-batches are made: a tensor, or a dict, list, tuple or named tuple of trees.

Other leaves are left as they are. torch walks such trees in a private module, `torch.utils._pytree`, which takes a
subclass of dict for a leaf: the dictionaries that tokenizers and other people's models return are such subclasses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Tree = Any
"""What a type checker can say of a tree."""
Batch = tuple[Tree, Tree]
"""Inputs and targets of a micro-batch."""
Collate = Callable[[list[Any]], Batch]
"""From the samples of one micro-batch, in the sequence of their ids, to its inputs and targets."""
Key = tuple[int, ...]
"""What the random numbers of a micro-batch follow from (`ddp_core.base.seeds.mix`)."""
_Ids = NDArray[np.int64]
StepIds = tuple[int, Sequence[_Ids]] | tuple[int, Sequence[_Ids], Sequence[Key]]
"""An epoch, and the ids of each micro-batch of one step; with the key of each where random numbers are keyed."""
_Value = TypeVar("_Value")


def as_it_is(value: _Value) -> _Value:
    """The value itself, where a function is asked for and nothing is to be done."""
    return value


def map_tensors(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """The tree with `function(tensor)` in the place of each tensor, in containers of the same types.

    With `others`, trees of the same structure, the function is called with the tensors that stand at the same place.
    """
    if isinstance(tree, Tensor):
        return function(tree, *others)
    kind: Any = type(tree)
    if isinstance(tree, Mapping):
        changed = {key: map_tensors(function, part, *(other[key] for other in others)) for key, part in tree.items()}
        try:
            return kind(changed)
        except TypeError:  # a defaultdict, for example, is not made from a dictionary
            return changed
    if isinstance(tree, list | tuple):
        parts = [map_tensors(function, *same) for same in zip(tree, *others, strict=True)]
        return kind(*parts) if hasattr(tree, "_fields") else kind(parts)
    return tree


def tensors_of(tree: Tree) -> Iterator[Tensor]:
    """The tensors of a tree, in its own sequence."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping | list | tuple):
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            yield from tensors_of(part)


def call(module: Callable[..., Tree], inputs: Tree) -> Tree:
    """What a model returns for a tensor, for a tuple or list of arguments, or for a dict of named arguments."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple | list) else module(inputs)


def structure_difference(tree: Tree, other: Tree, place: str) -> str | None:
    """Where two trees are built differently, in words that begin with the place; None where keys and lengths agree."""
    if isinstance(tree, Mapping) and isinstance(other, Mapping) and tree.keys() == other.keys():
        pairs = [(f"{place}[{key!r}]", tree[key], other[key]) for key in tree]
    elif isinstance(tree, list | tuple) and isinstance(other, list | tuple) and len(tree) == len(other):
        pairs = [(f"{place}[{number}]", *same) for number, same in enumerate(zip(tree, other, strict=True))]
    elif isinstance(tree, Mapping | list | tuple) or isinstance(other, Mapping | list | tuple):
        return f"{place} is {structure_of(tree)} and {structure_of(other)}"
    else:
        return None
    return next(filter(None, (structure_difference(part, same, there) for there, part, same in pairs)), None)


def structure_of(tree: Tree) -> str:
    """What stands at the top of a tree: 'a dict with the keys a, b', 'a list of 3', 'a Tensor'."""
    name = type(tree).__name__
    if isinstance(tree, Mapping):
        return f"a {name} with the keys {', '.join(map(str, tree))}" if tree else f"an empty {name}"
    return f"a {name} of {len(tree)}" if isinstance(tree, list | tuple) else f"a {name}"

"""The samples of one micro-batch put together: by torch's `default_collate`, or by the experiment's own `collate`."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from ddp_core.base.errors import UserError
from ddp_core.data.trees import Tree, difference, in_words, map_tensors

Batch = tuple[Tree, Tree]
"""Inputs and targets of a micro-batch: trees of tensors (`ddp_core.data.trees`)."""
Collate = Callable[[list[Any]], Batch]
"""From the samples of one micro-batch, in the sequence of their ids, to its inputs and targets."""

_PAIR = "a pair (inputs, targets), each a tensor or a dict, list or tuple of tensors"
_ALIGNMENT = 64


def stack(samples: list[Any], ids: Sequence[int]) -> Batch:
    """Pairs as one pair, whose tensors have a first dimension more. `ids`: of the samples, for messages.

    Raises UserError where a sample is no pair, or where samples differ in structure, shape or type.
    """
    first = samples[0]
    if not isinstance(first, tuple | list) or len(first) != 2:
        raise UserError(
            f"sample {ids[0]} is {in_words(first)}; let __getitem__ return {_PAIR}, "
            "or define collate(samples) in the experiment file, which returns one"
        )
    if any(isinstance(part, Mapping | list | tuple) for part in first):
        # default_collate takes the first sample's keys, and says nothing of others.
        for sample, number in zip(samples, ids, strict=True):
            found = difference(first, sample, "(inputs, targets)")
            if found is not None:
                raise UserError(
                    f"samples {ids[0]} and {number} are built differently: {found}; let every sample have the same "
                    "keys and lengths, or define collate(samples) in the experiment file"
                )
    try:
        inputs, targets = default_collate(samples)
    except (RuntimeError, TypeError) as error:
        raise UserError(
            f"samples {list(ids)} cannot be put together: {' '.join(str(error).split())}; let every sample have the "
            "same shape and type, or define collate(samples) in the experiment file, which may pad them"
        ) from None
    return inputs, targets


def collated(collate: Collate, samples: list[Any], ids: Sequence[int]) -> Batch:
    """What the experiment's own `collate` makes of the samples. `ids`: of the samples, for messages.

    Raises UserError, with the line, for an exception inside `collate`, and for a result that is no pair.
    """
    try:
        result = collate(samples)
    except (UserError, MemoryError):
        raise
    except Exception as error:
        reason = ": ".join(part for part in (type(error).__name__, " ".join(str(error).split())) if part)
        raise UserError(f"{_place(collate, error)}: collate raised {reason}, for samples {list(ids)}") from None
    return aligned(result, "collate returned")


def aligned(batch: Any, whence: str) -> Batch:
    """A batch that the experiment has made, with tensors that begin where torch's own do. Raises UserError for no pair.

    The address of a tensor decides which vector instructions run, and so the last bits. numpy's arrays, for example,
    begin anywhere.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise UserError(f"{whence} {in_words(batch)}; let it be {_PAIR}")
    inputs, targets = map_tensors(_aligned, batch)
    return inputs, targets


def _aligned(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.layout is torch.strided and tensor.data_ptr() % _ALIGNMENT else tensor


def _place(collate: Collate, error: Exception) -> str:
    """'file:line' of the exception's deepest point in the file that defines `collate`, or of its deepest point."""
    file = getattr(getattr(collate, "__code__", None), "co_filename", None)
    frames = traceback.extract_tb(error.__traceback__)
    frame = ([frame for frame in frames if frame.filename == file] or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"

"""Gives one process the batches of all ranks, so that its step is that of one process with all of their samples.

Several ranks leave their batches in a folder: those that a DataLoader hands out, and what their model is called with.
One process finds them there, put together or one after another. In both of these runs nothing of a step depends on
which samples a rank has: dropout drops nothing, and batch norm uses the statistics that it has.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ddp_lab.diagnose.recorder import place

TOGETHER, ONE_BY_ONE = "together", "one by one"
"""How the one process gets the ranks' batches."""
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


class Batches:
    """Batches of all ranks, in a folder; `given` says how one process gets them, and is empty where it has its own."""

    def __init__(self, folder: Path, given: str) -> None:
        self._folder, self._given = folder, given
        self._is_loaded = False

    def exchanged(self, source: str, index: int, batch: Any) -> Any:
        """The batch that one process is to have in the place of its own; of several ranks it is kept for that."""
        rank, world, _ = place()
        try:
            if world > 1:
                self._file(source, index, rank).write_bytes(pickle.dumps(batch))
            elif self._given:
                return self._of_all(source, index, batch)
        except Exception:  # a script's own objects may refuse anything; then other samples are seen
            pass
        return batch

    def in_forward(self, index: int, called_with: Any) -> tuple[Any, bool]:
        """What a model is to be called with, and whether that is another batch: only where no loader has given it."""
        found = called_with if self._is_loaded else self.exchanged("forward", index, called_with)
        return found, found is not called_with

    def _of_all(self, source: str, index: int, batch: Any) -> Any:
        if not (ranks := len(list(self._folder.glob(f"{source}-0-*")))):
            return batch
        places = [divmod(index, ranks)] if self._given == ONE_BY_ONE else [(index, rank) for rank in range(ranks)]
        found = _together([pickle.loads(self._file(source, *each).read_bytes()) for each in places])
        self._is_loaded |= source != "forward"
        return found

    def _file(self, source: str, index: int, rank: int) -> Path:
        return self._folder / f"{source}-{index}-{rank}"


def make_still() -> None:
    """Let dropout drop nothing in this process, and batch norm use its running statistics, not those of a batch."""
    for name in _DROPOUTS:
        setattr(functional, name, lambda given, *words, **named: given)
    attention, norm = functional.scaled_dot_product_attention, functional.batch_norm

    def without_dropout(
        query: Any, key: Any, value: Any, mask: Any = None, dropout_p: float = 0.0, *words: Any, **named: Any
    ) -> Any:
        return attention(query, key, value, named.pop("attn_mask", mask), 0.0, *words, **named)

    def as_it_is(
        given: Any,
        mean: Any,
        var: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        *words: Any,
        **named: Any,
    ) -> Any:
        return norm(given, mean, var, weight, bias, training and mean is None, *words, **named)

    for name, made in {"scaled_dot_product_attention": without_dropout, "batch_norm": as_it_is}.items():
        setattr(functional, name, made)


def _together(parts: Sequence[Any]) -> Any:
    """One batch of the samples of all parts. Raises ValueError for what is neither the same in all nor of samples."""
    first = parts[0]
    if isinstance(first, Tensor) and first.dim():
        return torch.cat(list(parts))
    if isinstance(first, Mapping):
        made = {key: _together([each[key] for each in parts]) for key in first}
        return made if type(first) is dict else type(first)(made)  # type: ignore[call-arg]
    if isinstance(first, list | tuple):
        if any(isinstance(each, Tensor | Mapping | list | tuple) for each in first):
            members = [_together(list(each)) for each in zip(*parts, strict=True)]
        elif all(each == first for each in parts) and isinstance(first, tuple):
            return first
        else:
            members = [each for part in parts for each in part]
        return type(first)(*members) if hasattr(first, "_fields") else type(first)(members)
    if not all(bool(each == first) for each in parts):
        raise ValueError("unlike words beside the samples")
    return first

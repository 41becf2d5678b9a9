"""Gives one process the batches of all ranks, so that its step is that of one process with all of their samples.

Several ranks leave their batches in a folder: those that a DataLoader hands out, what their model is called with, and
what the script draws for them, such as noise. One process finds them there, put together or one after another, and
takes the ranks' weights after each step, so that each is compared alone. In both of these runs nothing of a step
depends on which samples a rank has: dropout drops nothing, and batch norm uses the statistics that it has.
"""

from __future__ import annotations

import pickle
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ddp_lab.diagnose.recorder import place, wrap

TOGETHER, ONE_BY_ONE = "together", "one by one"
"""How the one process gets the ranks' batches."""
_STILL = {
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d"), (2, "training", False)),
    **dict.fromkeys(("alpha_dropout", "feature_alpha_dropout"), (2, "training", False)),
    **{"scaled_dot_product_attention": (4, "dropout_p", 0.0), "batch_norm": (5, "training", False)},
}
"""By function, the argument without which it does nothing by chance, or by a batch's statistics: its place and name."""
_DRAWS = ("randn", "rand", "randint", "randn_like", "rand_like")
_LARGEST_DRAWN = 1 << 20
"""In elements; what is larger is no batch's noise."""


class Batches:
    """Batches of all ranks, in a folder; `given` says how one process gets them, and is empty where it has its own."""

    def __init__(self, folder: Path, given: str) -> None:
        self._folder, self._given = folder, given
        self._has_begun = self._is_loaded = False
        self._counts: Counter[str] = Counter()

    def install(self) -> None:
        """Let what is drawn for all samples be what the ranks have drawn for theirs; and let a step be still."""
        for name in _DRAWS:
            wrap(torch, name, self._drawn)
        for name, (place_of, named, value) in _STILL.items():
            wrap(functional, name, _with(place_of, named, value))

    def of_loader(self, number: int, index: int, batch: Any) -> Any:
        """The batch that a loader is to hand out."""
        self._has_begun = True
        found = self._exchanged(f"loader_{number}", index, batch)
        self._is_loaded |= found is not batch
        return found

    def in_forward(self, called_with: Any) -> tuple[Any, bool]:
        """What a model is to be called with, and whether that is another batch: only where no loader has given it."""
        self._has_begun = True
        found = called_with if self._is_loaded else self._exchanged("forward", self._next("forward"), called_with)
        return found, found is not called_with

    def after_step(self, step: int, weights: Mapping[str, Tensor]) -> None:
        """Keep the first rank's weights for one process, or take them."""
        rank, world, _ = place()
        file = self._folder / f"weights-{step}"
        has_room = 2 * sum(each.nbytes for each in weights.values()) < shutil.disk_usage(self._folder).free
        if world > 1 and rank == 0 and has_room:  # else the next step begins with other weights, and proves nothing
            file.write_bytes(pickle.dumps({name: each.detach() for name, each in weights.items()}))
        elif world == 1 and file.exists():
            for name, each in pickle.loads(file.read_bytes()).items():
                if name in weights and weights[name].shape == each.shape:
                    weights[name].data.copy_(each)

    def _drawn(self, function: Callable[..., Any], *words: Any, **named: Any) -> Any:
        own = function(*words, **named)
        # What is drawn before training, such as data, is the same for all.
        if not self._has_begun or not own.dim() or own.numel() > _LARGEST_DRAWN:
            return own
        source = f"{function.__name__}_{tuple(own.shape[1:])}".replace(" ", "")
        found = self._exchanged(source, self._next(source), own)
        # One that has as many rows on any number of ranks is for no batch.
        return found if found.shape == own.shape and not own.requires_grad else own

    def _next(self, source: str) -> int:
        self._counts[source] += 1
        return self._counts[source] - 1

    def _exchanged(self, source: str, index: int, batch: Any) -> Any:
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

    def _of_all(self, source: str, index: int, batch: Any) -> Any:
        if not (ranks := len(list(self._folder.glob(f"{source}-0-*")))):
            return batch
        places = [divmod(index, ranks)] if self._given == ONE_BY_ONE else [(index, rank) for rank in range(ranks)]
        return _together([pickle.loads(self._file(source, *each).read_bytes()) for each in places])

    def _file(self, source: str, index: int, rank: int) -> Path:
        return self._folder / f"{source}-{index}-{rank}"


def _with(place_of: int, name: str, value: Any) -> Callable[..., Any]:
    """What calls a function with another argument at this place, or of this name."""

    def around(function: Callable[..., Any], *words: Any, **named: Any) -> Any:
        if function.__name__ == "batch_norm" and (words[1] if len(words) > 1 else named.get("running_mean")) is None:
            return function(*words, **named)  # it has no other statistics than the batch's
        if len(words) > place_of:
            return function(*words[:place_of], value, *words[place_of + 1 :], **named)
        return function(*words, **{**named, name: value})

    return around


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

"""What a data builder returns, and the kinds of data sets that are asked for a whole micro-batch at a time."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset
from torch.utils.data import Dataset as TorchDataset

from ddp_core.base.errors import UserError
from ddp_core.base.trees import Collate, Tree, structure_of
from ddp_core.sampler import Ids

if TYPE_CHECKING:
    from ddp_core.data.augment import Augmentation

_EXPECTED = (
    "a data builder returns a data set, which has __len__ and __getitem__(index), a pair (train, test) of them, "
    "or ddp_core.data.splits.Splits"
)
_INDEX = (
    "put its shards behind __len__ and __getitem__, or ask its library by index (docs/how-to/stream-from-shards.md)"
)

Sample = TypeVar("Sample", covariant=True)
"""What `__getitem__` returns."""


class Dataset(Protocol):
    """Samples by index: torch's map-style data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Weights = Sequence[int] | NDArray[np.int64]


@dataclass(frozen=True)
class Splits:
    """Training samples, held-out samples (None where there are none), and what belongs to them.

    `classes` is None for regression. `augmentation` is for training samples only. `digest` is a SHA-256 of the
    content, the same on every rank; it is written to the run's record. Where it is empty, `files`, the files that hold
    the data, are digested by content; where no files are given either, a sample of the items is digested. `collate`
    puts the samples of a micro-batch together, where torch's default cannot; a `collate` in the experiment file
    replaces it. `note` is said before training, once. `weights` are whole numbers, by training sample: then the summed
    loss of a global batch is divided by what its samples weigh together, such as all their tokens, in the place of
    their number; in an evaluation likewise by `test_weights`.
    """

    train: Dataset
    test: Dataset | None = None
    classes: int | None = None
    augmentation: Augmentation | None = None
    digest: str = ""
    files: Sequence[Path] = ()
    collate: Collate | None = None
    note: str = ""
    weights: Weights | None = None
    test_weights: Weights | None = None
    most: int | None = None
    """At most so many samples are trained in an epoch; None for all, as in every run but one in miniature."""

    @property
    def trained(self) -> int:
        """How many samples an epoch has. Raises whatever the data set's `__len__` does."""
        samples = len(self.train)
        return samples if self.most is None else min(samples, self.most)


def weights_of(given: Weights | None, samples: int, whose: str) -> NDArray[np.int64] | None:
    """The weights of so many samples. Raises UserError, with the name `whose`, for what cannot be weights of these."""
    if given is None:
        return None
    found = np.asarray(given)
    if found.shape != (samples,) or found.dtype.kind not in "iu" or (found.astype(int) < 0).any() or not found.any():
        raise UserError(f"{whose}: needed are whole numbers from 0 on, one for each of {samples} samples, not all 0")
    return found.astype(np.int64)


def as_splits(built: Any, whose: str) -> Splits:
    """What a data builder returned, as splits: Splits, a data set, or a pair (training, held-out samples).

    Raises UserError for anything else, and for a stream. `whose` begins the message.
    """
    if isinstance(built, Splits):
        splits = built
    elif isinstance(built, tuple | list) and len(built) == 2:
        splits = Splits(*built)
    elif isinstance(built, tuple | list | Mapping | str):
        way = "; a list of samples goes into Splits(train=...)" if isinstance(built, list) else ""
        raise UserError(f"{whose} returned {structure_of(built)}; {_EXPECTED}{way}")
    else:
        splits = Splits(built)
    _require_indexed(splits.train, f"{whose}: train")
    if splits.test is not None:
        _require_indexed(splits.test, f"{whose}: test")
    return splits


def _require_indexed(dataset: Any, what: str) -> None:
    """Raise UserError, whose message begins with `what`, unless samples can be asked for by index."""
    kind = type(dataset)
    if isinstance(dataset, DataLoader):
        raise UserError(
            f"{what} is a {kind.__name__}; return its data set: the trainer loads micro-batches itself, "
            "with --workers N in processes of their own"
        )
    indexed = hasattr(kind, "__getitem__") and not isinstance(dataset, IterableDataset)
    if not indexed and hasattr(kind, "__iter__"):
        raise UserError(
            f"{what} is a {kind.__name__}, a stream: its samples have no index, so no rank could begin at a position "
            f"of its own; {_INDEX}"
        )
    if not indexed or not hasattr(kind, "__len__"):
        raise UserError(f"{what} is a {kind.__name__}; {_EXPECTED}")


class Staged(TorchDataset[Sample], ABC):
    """A data set that fetches a micro-batch as it is stored, and finishes it on the device that trains.

    Images stored as bytes then travel to a GPU as bytes, a quarter of their float32, and the host only copies rows.
    Subclasses have `__len__` and `__getitem__`, too, which gives one finished sample.
    """

    @abstractmethod
    def gather(self, ids: Ids | Sequence[int], pin_memory: bool = False) -> tuple[Any, Any]:
        """Inputs and targets of the samples `ids` as they are stored: two trees of new CPU tensors [n, …].

        `pin_memory`: whether to put them into pinned memory at once; tensors that are not there are copied later.
        """

    def finish(self, inputs: Tree) -> Tree:
        """The inputs that the model gets, made of what `gather` gave, on the device where it lies, sample by sample."""
        return inputs


class InMemory(Staged[tuple[Tensor, Tensor]]):
    """Samples as two tensors, inputs [N, …] and targets [N, …], of any dtypes; sample `id` is row `id % N`.

    `size`: how many samples there are, N where it is None; with more, rows are used again. Raises ValueError where
    there are not as many targets as inputs.

    `__getitems__` copies all samples of a micro-batch in one call, for MicroBatches, too. torch's own DataLoader
    collates lists of samples; there, pass `collate_fn=lambda batch: batch`.
    """

    def __init__(self, inputs: Tensor, targets: Tensor, size: int | None = None) -> None:
        if len(inputs) != len(targets):
            raise ValueError(f"{len(inputs)} inputs but {len(targets)} targets")
        self.inputs, self.targets = inputs.contiguous(), targets.contiguous()
        self.size = len(inputs) if size is None else size
        self._repeats = self.size != len(inputs)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not -self.size <= index < self.size:
            raise IndexError(f"sample {index} of {self.size}")
        inputs, targets = self.__getitems__([index % self.size])
        return inputs[0], targets[0]

    def __getitems__(self, ids: Ids | Sequence[int]) -> tuple[Tensor, Tensor]:
        inputs, targets = self.gather(ids)
        return self.finish(inputs), targets

    def gather(self, ids: Ids | Sequence[int], pin_memory: bool = False) -> tuple[Tensor, Tensor]:
        """The rows of the samples `ids`, copied."""
        rows = torch.from_numpy(np.asarray(ids, dtype=np.int64))
        if self._repeats:
            rows = rows % len(self.inputs)
        if not pin_memory:
            return self.inputs.index_select(0, rows), self.targets.index_select(0, rows)
        return _pinned_rows(self.inputs, rows), _pinned_rows(self.targets, rows)


class Standardise:
    """Makes float32 of bytes: (pixel - 255 * mean) / (255 * deviation), channel by channel, on the pixels' device.

    Images are uint8 [n, channels, height, width] or [channels, height, width].
    """

    def __init__(self, mean: Sequence[float], deviation: Sequence[float]) -> None:
        offset = torch.tensor(mean).mul(255).view(-1, 1, 1)
        factor = torch.tensor(deviation).mul(255).reciprocal().view(-1, 1, 1)
        self._constants = {offset.device: (offset, factor)}

    def __call__(self, images: Tensor) -> Tensor:
        device = images.device
        if device not in self._constants:
            offset, factor = self._constants[torch.device("cpu")]
            # The host waits for these two copies, once, so that every stream finds them done.
            self._constants[device] = offset.to(device), factor.to(device)
        offset, factor = self._constants[device]
        return images.float().sub_(offset).mul_(factor)


class ByteImages(InMemory):
    """Images kept as bytes [N, channels, height, width]; a micro-batch of them is standardised float32."""

    def __init__(
        self,
        images: Tensor,
        targets: Tensor,
        mean: Sequence[float],
        deviation: Sequence[float],
        size: int | None = None,
    ) -> None:
        super().__init__(images, targets, size)
        self._standardise = Standardise(mean, deviation)

    def finish(self, inputs: Tensor) -> Tensor:
        """The images standardised, float32."""
        return self._standardise(inputs)


def _pinned_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    pinned = torch.empty((len(rows), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=True)
    return torch.index_select(tensor, 0, rows, out=pinned)


def content_digest(*tensors: Tensor) -> str:
    """SHA-256 over each tensor's dtype, shape and bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def first_items(dataset: Dataset, count: int) -> Dataset:
    """The first items of a data set, at most so many."""
    few: Subset[Any] = Subset(dataset, range(min(count, len(dataset))))  # type: ignore[arg-type]
    return few


def stratified(labels: NDArray[np.int64], share: float) -> NDArray[np.bool_]:
    """Which samples are held out: the same share of every class, chosen by RandomState, whose stream never changes."""
    chosen = np.zeros(len(labels), dtype=bool)
    generator = np.random.RandomState(0)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        chosen[generator.permutation(members)[: round(share * len(members))]] = True
    return chosen

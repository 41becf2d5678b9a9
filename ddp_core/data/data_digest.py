"""What a data set contains, in one digest and its parts, so that a change can be named.

A builder that gives a digest is believed. Otherwise the files that it names are read, or a keyed sample of the items.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddp_core.base.digests import tree_digest
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.files import sha256_of
from ddp_core.base.seeds import generators_kept
from ddp_core.base.user_code import user_code
from ddp_core.data.splits import Dataset, Splits
from ddp_core.sampler import Permutation

SAMPLED = 64
"""Items of each split that are read where the builder gives neither a digest nor files."""
_READ_TWICE = 8
"""How many of these items, in each split, are read again, to see whether they are the same."""
_MOST_READ_TWICE = 1000
"""How many training samples are read twice where a run has met other bits."""
MOST_BYTES = 4 << 30
"""How much is read at each start where the builder names files: some seconds on a local disk."""
_THREADS = 8


@dataclass(frozen=True)
class DataDigest:
    """The digest of a data set, and of what it was made."""

    sha256: str | None
    """None where items differ from one read to the next, so that no digest means anything."""
    digest_of: str
    """What was read, in words."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """The SHA-256 of each item by its name, or that (or the size) of each file by its relative path.

    Empty where the builder gave the digest.
    """
    sampled: bool = False
    """Whether a part of the data alone was read: a change of the rest is not noticed."""

    def without_parts(self) -> DataDigest:
        """What ranks tell each other of it."""
        return replace(self, parts={})


_GIVEN = "content, given by the builder"
_UNSTEADY = "nothing: items differ from one read to the next"
ADVICE = (
    "draw random numbers from a generator keyed by the item's index, or use Splits.augmentation "
    "(docs/how-to/use-data.md)"
)
"""What to do about items that differ from one read to the next."""


def digest_items(splits: Splits) -> DataDigest:
    """The digest that the builder gives, or one over a sample of the items; does not touch the random generators."""
    if splits.digest:
        return with_weights(DataDigest(splits.digest, _GIVEN), splits)
    parts, sizes, sampled = dict[str, str](), list[str](), False
    # Reading items must not change what is drawn in training.
    with generators_kept(), user_code("your data set"):
        for split, dataset in (("training", splits.train), ("held-out", splits.test)):
            if dataset is None:
                continue
            ids = _sample(len(dataset))
            sampled = sampled or len(ids) < len(dataset)
            sizes.append(f"{len(ids)} of {len(dataset)} {split} samples")
            found = [_item_digest(dataset, index) for index in ids]
            if found[:_READ_TWICE] != [_item_digest(dataset, index) for index in ids[:_READ_TWICE]]:
                return DataDigest(None, _UNSTEADY)
            parts |= {f"sample {index} ({split})": digest for index, digest in zip(ids, found, strict=True)}
    return with_weights(_of_parts(" and ".join(sizes), parts, sampled), splits)


def with_weights(found: DataDigest, splits: Splits) -> DataDigest:
    """The digest of the data and of what the samples weigh, which neither the builder's digest nor files need tell."""
    if splits.weights is None and splits.test_weights is None:
        return found
    weights = tree_digest([splits.weights, splits.test_weights])
    whole = hashlib.sha256(f"{found.sha256} {weights}".encode()).hexdigest()
    return replace(found, sha256=whole, parts={**found.parts, "weights": weights} if found.parts else {})


def unsteady_sample(splits: Splits) -> int | None:
    """The first training sample that is another one when it is read again, of a thousand; None where none is.

    Each read begins with the same state of the random generators, as each does in training.
    """

    def read(index: int) -> str:
        with generators_kept(), user_code("your data set"):
            return _item_digest(splits.train, index)

    ids = _sample(len(splits.train), _MOST_READ_TWICE)
    return next((index for index in ids if read(index) != read(index)), None)


def _sample(size: int, most: int = SAMPLED) -> list[int]:
    """Indices spread over the data set, the same ones for every run on as many samples."""
    return sorted(Permutation(size, (SAMPLED,))(range(min(size, most))).tolist())


def _item_digest(dataset: Dataset, index: int) -> str:
    # The loader asks in the same way: a data set with __getitems__ need not have a useful __getitem__.
    several: Callable[[list[int]], Any] | None = getattr(dataset, "__getitems__", None)
    try:
        return tree_digest(dataset[index] if several is None else several([index]))
    except Exception as error:
        # Training will meet the error where it matters, and say at which rank and step.
        return f"raises {type(error).__name__}"


def digest_files(files: Sequence[Path], budget: int = MOST_BYTES) -> DataDigest:
    """The digest over the contents of files, read by several threads. Raises UserError (4) for an unreadable one.

    A file is named by its path below the folder that all of them have in common. Where all files together have more
    bytes than the budget, a keyed sample of them is read, and the others count with their sizes.
    """
    paths = sorted({Path(file).absolute() for file in files})
    root = Path(os.path.commonpath([path.parent for path in paths]))
    try:
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "data-digest") as pool:
            sizes = [facts.st_size for facts in pool.map(Path.stat, paths)]
            read = _within(budget, sizes)
            digests = dict(zip(read, pool.map(sha256_of, [paths[number] for number in read]), strict=True))
    except OSError as error:
        raise UserError(f"data file {error.filename} cannot be read: {error.strerror}", ExitCode.RESOURCES) from None
    parts = {
        path.relative_to(root).as_posix(): digests.get(number, f"{size} bytes")
        for number, (path, size) in enumerate(zip(paths, sizes, strict=True))
    }
    count = f"{len(paths)} file{'' if len(paths) == 1 else 's'}"
    rest = "" if len(read) == len(paths) else f": the content of {len(read)} and the sizes of the others"
    return _of_parts(count + rest, parts, sampled=bool(rest))


def _within(budget: int, sizes: Sequence[int]) -> list[int]:
    """The numbers of the files that are read: all where they fit the budget, else a sample, of one at least."""
    if sum(sizes) <= budget:
        return list(range(len(sizes)))
    numbers = Permutation(len(sizes), (SAMPLED,))(range(len(sizes))).tolist()
    total = list(itertools.accumulate(sizes[number] for number in numbers))
    return sorted(numbers[: max(1, bisect.bisect_right(total, budget))])


def _of_parts(digest_of: str, parts: Mapping[str, str], sampled: bool) -> DataDigest:
    """The digest over the names and the digests of all parts."""
    text = "".join(f"{name}\0{digest}\n" for name, digest in sorted(parts.items()))
    sha256 = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
    return DataDigest(sha256, digest_of, parts, sampled)


def changed_at(before: DataDigest, now: DataDigest) -> str | None:
    """Where two digests differ, in words; None where they are the same, or where one of them means nothing."""
    if before.sha256 == now.sha256 or before.sha256 is None or now.sha256 is None:
        return None
    if before.digest_of != now.digest_of:
        return f"the digest was over {before.digest_of}, and is over {now.digest_of} now"
    if not before.parts or not now.parts:
        return "the builder gives another digest" if now.digest_of == _GIVEN else "the digest is another one"
    names = [
        name + ("" if name in before.parts and name in now.parts else " (gone)" if name in before.parts else " (new)")
        for name in {**before.parts, **now.parts}
        if before.parts.get(name) != now.parts.get(name)
    ]
    return f"changed at {names[0]}" + (f", and at {len(names) - 1} more" if len(names) > 1 else "")

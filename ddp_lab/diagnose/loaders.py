"""The DataLoaders of a diagnosed script: which samples they hand out, in which order, and when an epoch ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import wraps
from itertools import count
from numbers import Integral
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader

from ddp_lab.diagnose.recorder import Recorder, rows, site
from ddp_lab.diagnose.union import Batches


class Loaders:
    """The DataLoaders of this process, each with how often it was gone through."""

    def __init__(self, recorder: Recorder, batches: Batches | None) -> None:
        self._recorder, self._of_all = recorder, batches
        self._numbers: WeakKeyDictionary[DataLoader[Any], int] = WeakKeyDictionary()
        self._next_number = count()
        self._passes: Counter[int] = Counter()
        self._lengths: dict[int, int | None] = {}
        self._latest: int | None = None
        self._batches: Counter[tuple[int, int]] = Counter()
        """By loader and pass, how many batches a model was trained on."""
        self._evaluated: set[tuple[int, int]] = set()
        self._drawn: dict[int, list[Any]] = {}
        """By id of a sampler whose loader is just making its iterator, what that one will draw."""

    def install(self) -> None:
        """Wrap `DataLoader.__iter__`."""
        begin = DataLoader.__iter__

        @wraps(begin)
        def traced(loader: DataLoader[Any]) -> Any:
            number = self._numbers[loader] if loader in self._numbers else next(self._next_number)
            self._numbers[loader] = number
            index_sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
            self._watch_sampler(index_sampler)
            drawn = self._drawn[id(index_sampler)] = []
            batches = begin(loader)
            del self._drawn[id(index_sampler)]
            this_pass = self._passes[number]
            self._passes[number] += 1
            self._lengths[number] = _length(loader)
            sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
            self._recorder.write(
                "pass",
                **{"loader": number, "pass": this_pass, "length": self._lengths[number], "site": site()},
                samples=_length(loader.dataset),
                sampler=type(sampler).__name__,
                shuffles=getattr(sampler, "shuffle", type(sampler).__name__ == "RandomSampler"),
                drops_last=bool(loader.drop_last),
                batch_size=loader.batch_size,
            )
            return _Batches(self, batches, number, this_pass, drawn)

        DataLoader.__iter__ = traced  # type: ignore[method-assign]

    def handed_out(self, number: int, this_pass: int, index: int, ids: Any, batch: Any) -> Any:
        """The batch that goes to the script, which is this one but where it gets those of all ranks."""
        if self._of_all is not None and this_pass == 0:
            batch = self._of_all.exchanged(f"loader_{number}", index, batch)
        self._latest = number
        listed = ids if isinstance(ids, list | tuple) else [ids]
        known = all(isinstance(each, Integral) for each in listed)
        self._recorder.write(
            "batch",
            **{"loader": number, "pass": this_pass, "index": index},
            ids=[int(each) for each in listed] if known else None,
            rows=rows(batch),
        )
        return batch

    def ended(self, number: int, this_pass: int, batches: int) -> None:
        """A loader has no more batches."""
        self._recorder.write("end", **{"loader": number, "pass": this_pass, "batches": batches})

    def trained(self) -> None:
        """A model is trained on the latest batch."""
        if self._latest is not None:
            self._batches[self._latest, self._passes[self._latest] - 1] += 1

    def evaluated(self) -> None:
        """A model that is not trained was called on the latest batch."""
        if self._latest is not None and (key := (self._latest, self._passes[self._latest] - 1)) not in self._evaluated:
            self._evaluated.add(key)
            self._recorder.write("evaluation", **{"loader": key[0], "pass": key[1], "site": site()})

    def second_pass_comes(self, steps: int, most: int) -> bool:
        """Whether a training loader is to be gone through a second time within so many steps, and was not yet."""
        for (number, _), batches in list(self._batches.items()):
            length = self._lengths[number]
            if self._batches[number, 1] >= 2 or length is None:
                continue
            if (length + 2) * steps <= most * max(batches, self._batches[number, 0]):
                return True
        return False

    def _watch_sampler(self, sampler: Any) -> None:
        """Note what samplers of this class draw; ids stay unknown where it is no class of Python's."""
        kind = type(sampler)
        if "__iter__" not in dir(kind) or getattr(kind.__iter__, "is_traced", False) or kind.__module__ == "builtins":
            return
        begin = kind.__iter__

        @wraps(begin)
        def traced(this: Any) -> Iterator[Any]:
            # A sampler may be gone through by another one, too: then nobody asks for what it draws.
            drawn = self._drawn.get(id(this))
            return begin(this) if drawn is None else _noting(begin(this), drawn)

        traced.is_traced = True  # type: ignore[attr-defined]
        kind.__iter__ = traced


class _Batches:
    """A DataLoader's iterator, which says what it hands out."""

    def __init__(self, loaders: Loaders, batches: Any, number: int, this_pass: int, drawn: list[Any]) -> None:
        self._loaders, self._inner, self._number, self._pass = loaders, batches, number, this_pass
        self._drawn, self._index, self._is_over = drawn, 0, False

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._inner)
        except StopIteration:
            if not self._is_over:
                self._is_over = True
                self._loaders.ended(self._number, self._pass, self._index)
            raise
        ids = self._drawn[self._index] if self._index < len(self._drawn) else None
        batch = self._loaders.handed_out(self._number, self._pass, self._index, ids, batch)
        self._index += 1
        return batch

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _noting(items: Iterator[Any], drawn: list[Any]) -> Iterator[Any]:
    for each in items:
        drawn.append(each)
        yield each


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:
        return None

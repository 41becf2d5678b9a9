"""The DataLoaders of a diagnosed script: which samples they hand out, in which order, what is drawn, and when they end.

A loader's sampler, its collate function and what begins its workers are stood in for while it makes an iterator, which
keeps the stand-ins; the loader itself stays the script's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from numbers import Integral
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset

from ddp_lab.diagnose.recorder import Recorder, changed, generators, rows, site, wrap
from ddp_lab.diagnose.union import Batches


class Loaders:
    """The DataLoaders of this process, each with how often it was gone through."""

    def __init__(self, recorder: Recorder, batches: Batches | None) -> None:
        self.recorder, self._of_all = recorder, batches
        self._known: list[_Loader] = []
        self._latest: _Loader | None = None

    def install(self) -> None:
        """Wrap `DataLoader.__iter__`."""
        wrap(DataLoader, "__iter__", self._begin)

    def _begin(self, begin: Callable[..., Any], loader: DataLoader[Any]) -> Any:
        # By identity: a script's own loader may have no hash.
        this = next((each for each in self._known if each.loader is loader), None)
        if this is None:
            self._known.append(this := _Loader(loader, len(self._known)))
        batches = this.begin(begin)
        sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
        self.recorder.write(
            "pass",
            **{"loader": this.number, "pass": this.passes - 1, "length": this.length, "site": site()},
            samples=_length(loader.dataset),
            offered=_length(sampler) if loader.drop_last else None,
            sampler=type(sampler).__name__,
            shuffles=getattr(sampler, "shuffle", type(sampler).__name__ == "RandomSampler"),
        )
        return self._handed_out(batches, this, this.passes - 1, this.sampler.drawn)

    def _handed_out(self, batches: Any, this: _Loader, this_pass: int, drawn: list[Any]) -> Iterator[Any]:
        """The batches of one pass, each of which is told when the script gets it."""
        place = {"loader": this.number, "pass": this_pass}
        for index, loaded in enumerate(batches):
            # A loader of a kind of its own may not have called the stand-ins.
            batch, worker, draws = loaded if isinstance(loaded, _Loaded) else _Loaded(loaded, 0, {})
            self._latest = this
            if self._of_all is not None and not this_pass:
                batch = self._of_all.of_loader(this.number, index, batch)
            ids = drawn[index] if index < len(drawn) else None
            listed = ids if isinstance(ids, list | tuple) else [ids]
            known = [int(each) for each in listed if isinstance(each, Integral)]
            self.recorder.write(
                "batch",
                **{**place, "ids": known if len(known) == len(listed) else None, "rows": rows(batch)},
                **{"worker": worker, "draws": draws},
            )
            yield batch
        self.recorder.write("end", **place)

    def trained(self) -> None:
        """A model is trained on the latest batch."""
        if self._latest is not None:
            self._latest.trained[self._latest.passes - 1] += 1

    def evaluated(self) -> None:
        """A model that is not trained was called on the latest batch."""
        if (latest := self._latest) is not None and latest.evaluated < latest.passes:
            latest.evaluated = latest.passes
            self.recorder.write("evaluation", **{"loader": latest.number, "pass": latest.passes - 1, "site": site()})

    def second_pass_comes(self, steps: int, most: int) -> bool:
        """Whether a training loader is to be gone through a second time within so many steps, and was not yet."""
        return any(
            each.length is not None
            and each.trained[1] < 2
            and (each.length + 2) * steps <= most * max(each.trained.values())
            for each in self._known
            if each.trained.total()
        )


class _Loader:
    """One DataLoader, and how often it was gone through."""

    def __init__(self, loader: DataLoader[Any], number: int) -> None:
        self.loader, self.number = loader, number
        self.length: int | None = None
        self.passes = self.evaluated = 0
        self.trained: Counter[int] = Counter()
        """By pass, on how many batches a model was trained."""
        self.worker = _Worker(loader)
        self._drawn_by = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self.sampler = _Sampler(getattr(loader, self._drawn_by), self.worker)

    def begin(self, begin: Callable[..., Any]) -> Any:
        """An iterator that draws from the stand-ins."""
        swapped = {self._drawn_by: self.sampler, "worker_init_fn": self.worker.begin, "collate_fn": self.worker.collate}
        own = {name: each for name, each in vars(self.loader).items() if name in swapped}
        vars(self.loader).update({name: swapped[name] for name in own})
        try:
            batches = begin(self.loader)
        finally:
            vars(self.loader).update(own)
        self.passes += 1
        self.length = _length(self.loader)
        return batches


class _Sampler:
    """Goes through a loader's sampler in its place, and notes the indices that it gives."""

    def __init__(self, sampler: Any, worker: _Worker) -> None:
        self._sampler, self._worker = sampler, worker
        self.drawn: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        self.drawn = drawn = list[Any]()

        def note(each: Any) -> Any:
            drawn.append(each)
            self._worker.note()  # without workers, what the sampler has drawn from is no sample's
            return each

        return map(note, self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)


class _Loaded(NamedTuple):
    """A batch, and what was drawn in the process that has loaded it."""

    batch: Any
    worker: int
    draws: dict[str, tuple[str, str]]
    """By generator, its state before and after, where that is another."""


class _Worker:
    """Calls a loader's worker_init_fn and collate_fn, and notes what random numbers are drawn between them."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._begin, self._collate, self._dataset = loader.worker_init_fn, loader.collate_fn, loader.dataset
        self._number = 0
        self._states: dict[str, str] = {}

    def begin(self, number: int) -> None:
        """A worker begins; torch has set its seeds, and the script may set others."""
        if self._begin is not None:
            self._begin(number)
        self._number = number
        self.note()

    def note(self) -> None:
        """Samples are about to be loaded."""
        # Workers that go through a stream may draw its order alike, and each takes its part of it.
        self._states = {} if isinstance(self._dataset, IterableDataset) else generators(self._dataset)

    def collate(self, samples: Any) -> _Loaded:
        """They are loaded, and become a batch."""
        batch, before = self._collate(samples), self._states
        self.note()
        return _Loaded(batch, self._number, changed(before, self._states))


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except TypeError:
        return None

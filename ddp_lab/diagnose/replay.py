"""One process in the place of W ranks: replays their tapes side by side, and says what makes the bits another.

The reference of a script on W ranks is one process that makes the work of all of them: the same samples, cut into the
same micro-batches. It makes each operation of the ranks again, and adds up itself what they all-reduce. Then parts of
the W ranks' run are put in one by one, until the weights have the same bits:

    SAMPLES     the samples of each rank; random numbers are drawn in one sequence, sums are made in the ranks' order
    RANDOM      and each rank's own random numbers
    ADDITIONS   and the sums that the ranks have received

The last part that it takes is the answer. With all of them the replay must have the same bits, else it is none.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from ddp_core.base.errors import UserError
from ddp_lab.diagnose.again import APART, Made, exchange, leaves, set_generator
from ddp_lab.diagnose.findings import Finding
from ddp_lab.diagnose.recorder import digest
from ddp_lab.diagnose.tape import (
    Content,
    Entry,
    Exchange,
    Operation,
    Place,
    StepMade,
    Whole,
    read_tape,
)
from ddp_lab.diagnose.trace import Run

MOST_ORDERS = 5
"""On so many ranks at most it is tried for each number whether it is their sum in some order: that are 105 orders."""


class Part(IntEnum):
    """What a replay takes from the run on W ranks, each with all before it."""

    SAMPLES = 1
    RANDOM = 2
    ADDITIONS = 3


_NAMES = {
    Part.SAMPLES: "remains-samples",
    Part.RANDOM: "remains-random-numbers",
    Part.ADDITIONS: "remains-order-of-additions",
}


@dataclass
class Replayed:
    """What a replay has come to."""

    differs: str = ""
    """The first weight that has other bits than on the ranks, and after which step; empty where none has."""
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    """By step, rank 0's weights."""
    sums: int = 0
    """How many numbers of floating point the ranks have all-reduced."""
    unordered: int = 0
    """How many of them are the ranks' sum in no order."""


def remaining(run: Run) -> Finding:
    """The finding that names the last part that it takes, of a run whose ranks have written tapes.

    Raises UserError where they cannot be replayed, with the reason.
    """
    if run.problem or run.folder is None:
        raise UserError(run.problem)
    files = [run.folder / f"{rank.rank}.tape" for rank in run.ranks]
    if not all(file.exists() for file in files):
        raise UserError("it has ended before its steps were made")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the script's processes
    try:
        tapes = [read_tape(file) for file in files]
        if problem := next((problem for problem, _ in tapes if problem), ""):
            raise UserError(problem)
        return _answer([entries for _, entries in tapes])
    except UserError:
        raise
    except Exception as error:  # the operations are other people's, and may fail in any way without their program
        raise UserError(f"its operations cannot be made again: {error}") from error
    finally:
        torch.set_num_threads(threads)


def _answer(tapes: Sequence[list[Entry]]) -> Finding:
    world, whole = len(tapes), replay(tapes, Part.ADDITIONS)
    if whole.differs:
        raise UserError(f"its operations, made again in one process, give another {whole.differs}")
    steps = f"one process with the samples of {world} ranks, {len(whole.weights)} steps"
    if whole.unordered:
        evidence = f"{steps}: {whole.unordered} of {whole.sums} reduced numbers are the ranks' sum in no order"
        return Finding("other-sums", evidence, world)
    last = ""
    for part in (Part.SAMPLES, Part.RANDOM):
        found = replay(tapes, part)
        if not found.differs:
            return Finding(_NAMES[part], f"{steps}: {_before(part, last)}the same bits", world)
        last = f"{found.differs}, by {_largest(found.weights, whole.weights):.1g} of the largest weight"
    proof = (
        f"; each of the {whole.sums} reduced numbers is the ranks' sum in some order, bit for bit" if whole.sums else ""
    )
    return Finding(_NAMES[Part.ADDITIONS], f"{steps}: {_before(Part.ADDITIONS, last)}the same bits{proof}", world)


def _before(part: Part, differed: str) -> str:
    if part is Part.SAMPLES:
        return ""
    taken = "their random numbers" if part is Part.RANDOM else "the sums that they received"
    return f"another {differed}; with {taken} "


def _largest(steps: Sequence[Mapping[str, Tensor]], others: Sequence[Mapping[str, Tensor]]) -> float:
    """The largest difference of two runs' last weights, as a part of the largest weight."""
    one, other = steps[-1], others[-1]
    largest = max(float(each.double().abs().max()) for each in other.values() if each.numel())
    difference = max(float((one[name].double() - other[name].double()).abs().max()) for name in other)
    return difference / largest if largest else difference


def replay(tapes: Sequence[list[Entry]], part: Part) -> Replayed:
    """Make all operations of all ranks again in this process, up to each all-reduce in turn.

    Raises UserError where ranks do not meet at the same all-reduce, or an operation is not known here.
    """
    found = Replayed()
    state = torch.get_rng_state()
    try:
        _begin_generator(tapes)
        ranks = [_Rank(entries, part) for entries in tapes]
        runs = [rank.run() for rank in ranks]
        while True:
            at = [next(each, None) for each in runs]
            if all(each is None for each in at):
                return found
            if all(isinstance(each, Exchange) for each in at):
                exchange([each for each in at if isinstance(each, Exchange)], ranks)
            elif all(isinstance(each, StepMade) for each in at):
                step = next(each for each in at if isinstance(each, StepMade))
                _look_at_weights(step, ranks[0], found)
            else:
                raise UserError(APART)
            if part is Part.ADDITIONS:
                _count(ranks, found)
            else:
                for rank in ranks:
                    rank.given.clear()
    finally:
        torch.set_rng_state(state)


class _Rank(Made):
    """One of the ranks that are replayed."""

    def __init__(self, entries: list[Entry], part: Part) -> None:
        super().__init__()
        self._entries = entries
        self._part = part
        self._last = _last_uses(entries)
        self.received: list[tuple[Exchange, list[Tensor]]] = []
        """What was received from all-reduces, as far as it is known by now."""
        self._exchanges: dict[int, Exchange] = {}

    def run(self) -> Generator[Exchange | StepMade, None, None]:
        """Make the operations, up to the next exchange or step."""
        for index, entry in enumerate(self._entries):
            if isinstance(entry, Content):
                self._content(entry)
            elif isinstance(entry, Operation):
                self.make(entry, draws=self._part is not Part.SAMPLES)
            elif isinstance(entry, Exchange):
                self._exchanges[entry.number] = entry
                self.give(entry)
                yield entry
            elif isinstance(entry, StepMade):
                yield entry
            for number in self._last.get(index, ()):
                self.storages.pop(number, None)

    def _content(self, entry: Content) -> None:
        if entry.exchange is not None and self._part is not Part.ADDITIONS:
            return  # this process has made it itself
        self.fill(entry)
        if entry.exchange is not None:
            made = self._exchanges[entry.exchange]
            if made.operation and all(each.storage == entry.storage for each in made.given):
                self.received.append((made, [self.at(each).clone() for each in made.given]))


def _begin_generator(tapes: Sequence[list[Entry]]) -> None:
    """Put torch's generator where rank 0 first draws from it."""
    for entry in tapes[0]:
        if isinstance(entry, Operation) and entry.generator is not None:
            set_generator(entry.generator)
            return


def _look_at_weights(step: StepMade, rank: _Rank, found: Replayed) -> None:
    weights = {name: rank.at(place).clone() for name, place in step.places.items()}
    found.weights.append(weights)
    if not found.differs:
        name = next((name for name, each in weights.items() if digest(each) != step.digests[name]), "")
        found.differs = f"{name} after step {len(found.weights)}" if name else ""


def _count(ranks: Sequence[_Rank], found: Replayed) -> None:
    """How many numbers that rank 0 has received are the sum of what all ranks have given, in some order."""
    while ranks[0].received:
        made, received = ranks[0].received.pop(0)
        for index, result in enumerate(received):
            is_sum = made.operation in ("SUM", "AVG") and result.is_floating_point()
            if is_sum and len(ranks) <= MOST_ORDERS:
                parts = [rank.given[made.number][index] for rank in ranks]
                found.sums += result.numel()
                found.unordered += result.numel() - sums_in_some_order(parts, result, made.operation)
        for rank in ranks:
            rank.given.pop(made.number, None)


def sums_in_some_order(parts: Sequence[Tensor], result: Tensor, operation: str = "SUM") -> int:
    """How many elements of the result are the sum of the parts' in some order, bit for bit; for AVG, their mean."""
    fits = torch.zeros(result.shape, dtype=torch.bool)
    for order in _orders(tuple(range(len(parts)))):
        total = _added(parts, order)
        candidate = total / len(parts) if operation == "AVG" else total
        fits |= (candidate == result) | (candidate.isnan() & result.isnan())
    return int(fits.sum())


def _added(parts: Sequence[Tensor], order: Any) -> Tensor:
    if isinstance(order, int):
        return parts[order]
    return _added(parts, order[0]) + _added(parts, order[1])


@cache
def _orders(parts: tuple[int, ...]) -> list[Any]:
    """All ways to add up the parts two by two; the two of a pair may change places, which changes no bit."""
    if len(parts) == 1:
        return [parts[0]]
    first, rest = parts[0], parts[1:]
    found: list[Any] = []
    for count in range(len(rest)):
        for beside in combinations(rest, count):
            others = tuple(each for each in rest if each not in beside)
            found += [(one, other) for one in _orders((first, *beside)) for other in _orders(others)]
    return found


def _last_uses(entries: Sequence[Entry]) -> dict[int, list[int]]:
    """By entry, the storages that none after it needs."""
    last: dict[int, int] = {}
    for index, entry in enumerate(entries):
        for number in _storages(entry):
            last[number] = index
    by_entry: dict[int, list[int]] = {}
    for number, index in last.items():
        by_entry.setdefault(index, []).append(number)
    return by_entry


def _storages(entry: Entry) -> Iterator[int]:
    if isinstance(entry, Content):
        yield entry.storage
        return
    tree: Any = None
    if isinstance(entry, Operation):
        tree = [entry.given, entry.made]
    elif isinstance(entry, Exchange):
        tree = [entry.given, entry.received]
    elif isinstance(entry, StepMade):
        tree = list(entry.places.values())
    yield from (each.storage for each in leaves(tree) if isinstance(each, Place | Whole))

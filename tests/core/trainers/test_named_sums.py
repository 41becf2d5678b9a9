"""The experiment's own metrics: sums, counts and totals that do not depend on who adds up which batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.world import World
from ddp_core.trainers.own_metrics import NamedMetric, NamedSums
from tests.core.checkpoint.parts_cases import ThreadRanks, in_threads
from tests.support.wording import refusing

BATCHES = 7


class _OnThread(Collectives):
    """Of a rank that is a thread."""

    def __init__(self, ranks: ThreadRanks) -> None:
        super().__init__(World(ranks.rank, ranks.count), torch.device("cpu"))
        self.gather = ranks.gather  # type: ignore[method-assign]


def together(ranks: Sequence[NamedSums]) -> list[Any]:
    """What each of these ranks gets, or raises."""
    return in_threads(lambda thread: totals(ranks[thread.rank], _OnThread(thread)), len(ranks))


def totals(sums: NamedSums, collectives: Collectives) -> Any:
    return sums.figures(collectives)()[""]


def figures(outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    return {
        "spread": (outputs.abs().sum(), len(outputs)),
        "per_column": (outputs.sum(0), torch.tensor([len(outputs), 0])),
        "counts": torch.bincount(targets, minlength=3).reshape(1, 3),
        "total": outputs.double().sum(),
        "right": (targets == 1).sum(),
    }


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    scale = 10.0 ** (3 * (number - 3))
    size = 5 if number < BATCHES - 1 else 2
    return scale * torch.randn(size, 2, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def added(numbers: Sequence[int], metrics: NamedMetric = figures) -> NamedSums:
    sums = NamedSums({"": metrics})
    for number in numbers:
        sums.add(*batch(number))
    return sums


ALONE = Collectives(World(), torch.device("cpu"))


def test_the_totals_are_exact_sums_rounded_once() -> None:
    found = totals(added(range(BATCHES)), ALONE)
    rows = [figures(*batch(number)) for number in range(BATCHES)]
    exact = sum((Fraction(row["total"].item()) for row in rows), Fraction())
    assert found["total"] == float(exact)
    samples = sum(row["spread"][1] for row in rows)
    assert found["spread"] == float(sum((Fraction(row["spread"][0].item()) for row in rows), Fraction())) / samples
    counts = sum(row["counts"] for row in rows)
    assert isinstance(counts, Tensor)
    assert found["counts"] == counts.tolist()
    assert found["right"] == sum(int(row["right"]) for row in rows)
    assert type(found["right"]) is int
    assert found["per_column"][1] is None, "nothing was counted there"
    assert math.isfinite(found["per_column"][0])


@pytest.mark.parametrize("ranks", [2, 3, 9])
def test_ranks_in_turn_or_rank_0_alone_give_the_same_bits_as_one(ranks: int) -> None:
    expected = [totals(added(range(BATCHES)), ALONE)] * ranks
    assert together([added(range(rank, BATCHES, ranks)) for rank in range(ranks)]) == expected
    assert together([added(range(BATCHES)), *(added([]) for _ in range(1, ranks))]) == expected


def test_whole_numbers_do_not_pass_through_floats() -> None:
    big = 2**60 + 1
    sums = NamedSums({"": lambda outputs, targets: {"n": big}})
    for _ in range(2):
        sums.add(None, None)
    assert totals(sums, ALONE) == {"n": 2 * big}


def test_what_is_no_figure_is_refused() -> None:
    sizes = (torch.zeros(2), torch.zeros(3))
    figures = ({"f1": "high"}, {"f1": (1, 2, 3)}, {"f1": torch.zeros(1, dtype=torch.complex64)}, {"f1": sizes})
    for returned in (7, {1: 2}, {"": 2}, *figures):
        with refusing():
            added([0], lambda outputs, targets, returned=returned: returned)


@pytest.mark.parametrize(
    "change",
    [
        lambda outputs: {"a": outputs},
        lambda outputs: {"a": outputs.sum() if len(outputs) == 5 else 1},
        lambda outputs: {f"a{len(outputs)}": 1},
    ],
    ids=["shape", "type", "name"],
)
def test_figures_that_change_between_batches_are_refused(change: Any) -> None:
    def metrics(outputs: Tensor, targets: Tensor) -> Any:
        return change(outputs)

    with refusing():
        added([0, BATCHES - 1], metrics)
    first, second = together([added([0], metrics), added([BATCHES - 1], metrics)])
    assert str(first) == str(second)
    with refusing():
        raise first

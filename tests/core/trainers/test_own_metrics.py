"""What an experiment file may name `metrics`: a function, or metrics by name, each perhaps with a `finish`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_core.base.errors import ExitCode
from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.world import World
from ddp_core.experiment.blame import unforeseen
from ddp_core.trainers.own_metrics import OwnFigures, OwnMetrics
from tests.support.wording import refusing

CPU = torch.device("cpu")
ALONE = Collectives(World(), CPU)
BATCHES = [(torch.tensor([0.5, 2.0]), torch.tensor([0, 1])), (torch.tensor([-1.0]), torch.tensor([1]))]


class Finished:
    """Adds up what `counts` returns, and reports what `make` makes of it."""

    def __init__(self, counts: Any, make: Any) -> None:
        self.counts, self.make = counts, make

    def __call__(self, outputs: Tensor, targets: Tensor) -> Any:
        return self.counts(outputs, targets)

    def finish(self, sums: Any) -> Any:
        return self.make(sums)


def figures(own: Any) -> dict[str, Any]:
    counted = OwnFigures(OwnMetrics.of(own), CPU)
    for number, batch in enumerate(BATCHES):
        counted.add(number, *batch)
    return counted.all(ALONE)


def total(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.sum()


def pair(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return outputs.sum(), len(outputs)


def both(outputs: Tensor, targets: Tensor) -> dict[str, Any]:
    return {"total": total(outputs, targets), "mean": pair(outputs, targets), "ones": targets.sum()}


def test_a_function_and_metrics_by_name_report_the_same() -> None:
    assert figures(both) == {"test_total": 1.5, "test_mean": 0.5, "test_ones": 2}
    assert figures({"total": total, "mean": pair}) == {"test_total": 1.5, "test_mean": 0.5}
    assert figures({"all": both}) == {"test_all_total": 1.5, "test_all_mean": 0.5, "test_all_ones": 2}


def test_finish_gets_the_sums_of_all_batches_in_the_form_in_which_they_were_returned() -> None:
    told: list[Any] = []
    for counts in (total, pair, both):
        figures({"any": Finished(counts, told.append)})
    alone, (of_pair, count), dictionary = told
    assert alone == of_pair == dictionary["total"] == 1.5
    assert count == 3
    assert dictionary["mean"] == (1.5, 3)
    assert dictionary["ones"] == 2
    assert {each.dtype for each in (alone, of_pair, count, dictionary["ones"])} == {torch.float64}


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda sums: (sums / 3).exp(), {"test_any": pytest.approx(math.exp(0.5))}),
        (lambda sums: {"a": 1, "b": {"c": torch.tensor([1, 2])}}, {"test_any_a": 1, "test_any_b_c": [1, 2]}),
        (lambda sums: (1.0, float("inf"), None), {"test_any": [1.0, None, None]}),
        (lambda sums: sums / 0, {"test_any": None}),
        (lambda sums: {}, {}),
    ],
)
def test_what_finish_returns_is_reported(made: Any, expected: dict[str, Any]) -> None:
    assert figures({"any": Finished(total, made)}) == expected


def test_the_function_itself_may_have_a_finish() -> None:
    own = Finished(both, lambda sums: {"ratio": sums["total"] / sums["ones"]})
    assert figures(own) == {"test_ratio": 0.75}
    with refusing():
        figures(Finished(both, lambda sums: sums["total"]))


def test_what_is_no_metric_is_refused() -> None:
    for own in (
        *({"f1": Finished}, {"f1": 3}, {3: total}, {"loss": total}, lambda *batch: {"accuracy": 2}),
        {"a_b": total, "a": lambda *batch: {"b": 2}},
        {"f1": Finished(total, lambda sums: "high")},
        {"f1": lambda *batch: "high"},
    ):
        with refusing():
            figures(own)


def test_a_finish_that_raises_is_the_users() -> None:
    def fail(sums: Tensor) -> None:
        raise KeyError("tokens")

    with pytest.raises(KeyError) as failure:
        figures({"f1": Finished(total, fail)})
    assert unforeseen(failure.value)[0] == ExitCode.BAD_INPUT

"""Metrics of torchmetrics: the figure of one object that counts all batches, whoever counts which, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_core.base.errors import UserError
from ddp_core.base.torchvision_import import import_torchvision
from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.world import World
from ddp_core.trainers.metric_states import MetricStates
from ddp_core.trainers.own_metrics import OwnFigures, OwnMetrics, _named

pytestmark = pytest.mark.extras("torchmetrics")

CPU = torch.device("cpu")
SIZES = (7, 7, 7, 2)


class _Gathers(Collectives):
    """Stands for ranks, and gives what each of them has told."""

    def __init__(self, told: list[Any]) -> None:
        super().__init__(World(), CPU)
        self._told = told

    def gather(self, value: Any) -> list[Any]:
        self._told.append(value)
        return self._told


Batch = tuple[Tensor, Tensor]
KINDS: dict[str, Callable[[int], Batch]] = {
    "classes": lambda size: (torch.randn(size, 3), torch.randint(0, 3, (size,))),
    "shares": lambda size: (torch.rand(size), torch.randint(0, 2, (size,))),
    "numbers": lambda size: (torch.randn(size), torch.randn(size)),
    "words": lambda size: (torch.randn(size, 5, 11), torch.randint(0, 11, (size, 5))),
}


def torchmetrics() -> Any:
    import_torchvision()
    import torchmetrics

    return torchmetrics


def batches(kind: str) -> list[Batch]:
    torch.manual_seed(0)
    return [KINDS[kind](size) for size in SIZES]


def merged(metric: Any, given: list[Batch], ranks: int = 1, compared: bool = False) -> dict[str, Any]:
    """The figures where so many ranks take the batches in turn."""
    told: list[Any] = []
    for rank in reversed(range(ranks)):
        states = MetricStates(OwnMetrics.of({"it": metric}).of_torchmetrics, CPU, compared)
        for number in range(rank, len(given), ranks):
            states.add(number, *given[number])
        figures = states.figures(_Gathers(told))
    return _named(figures())


@pytest.mark.parametrize(
    ("name", "options", "kind"),
    [
        ("classification.BinaryAUROC", {}, "shares"),
        ("classification.BinaryAveragePrecision", {"thresholds": 20}, "shares"),
        ("classification.BinaryROC", {"thresholds": 5}, "shares"),
        ("classification.MulticlassF1Score", {"num_classes": 3, "average": "macro"}, "classes"),
        ("regression.R2Score", {}, "numbers"),
        ("regression.SpearmanCorrCoef", {}, "numbers"),
        ("image.PeakSignalNoiseRatio", {"data_range": (-1, 1)}, "numbers"),
        ("text.Perplexity", {}, "words"),
    ],
)
def test_the_figure_is_that_of_one_object_that_counts_all_batches(name: str, options: Any, kind: Any) -> None:
    library, _, last = f"torchmetrics.{name}".rpartition(".")
    torchmetrics()
    make = getattr(__import__(library, fromlist=[last]), last)
    plain, given = make(**options), batches(kind)
    for batch in given:
        plain.update(*batch)
    expected = _named({"it": plain.compute()})
    metric = make(**options)
    for ranks in (1, 2, 3):
        assert merged(metric, given, ranks) == expected
    assert merged(metric, given[:2], compared=True)
    assert not metric.update_called, "the user's object is left alone"


def test_states_without_a_reduction_are_stacked_as_torchmetrics_does_with_ranks() -> None:
    metric, given = torchmetrics().regression.PearsonCorrCoef(), batches("numbers")
    inputs, targets = map(torch.cat, zip(*given, strict=True))
    expected = torch.corrcoef(torch.stack([inputs, targets]))[0, 1].item()
    assert merged(metric, given) == {"test_it": pytest.approx(expected, rel=1e-5)}
    assert merged(metric, given, 2) == merged(metric, given, 3) == merged(metric, given)


def test_metrics_that_are_made_of_others() -> None:
    library, given = torchmetrics(), batches("classes")
    accuracy, precision = library.classification.MulticlassAccuracy(3), library.classification.MulticlassPrecision(3)
    collection = library.MetricCollection([accuracy, precision], prefix="my_")
    assert [*OwnMetrics.of(collection).of_torchmetrics] == ["my_MulticlassAccuracy", "my_MulticlassPrecision"]
    assert [*OwnMetrics.of(accuracy).of_torchmetrics] == ["MulticlassAccuracy"]
    both, alone = merged(accuracy * 2 + precision, given, 2), merged(precision, given)["test_it"]
    assert both["test_it"] == pytest.approx(2 * merged(accuracy, given)["test_it"] + alone)
    each = merged(library.wrappers.ClasswiseWrapper(library.classification.MulticlassAccuracy(3, average=None)), given)
    assert [*each] == [f"test_it_multiclassaccuracy_{number}" for number in range(3)]


def test_they_are_reported_beside_functions_and_none_of_them_is_left_changed() -> None:
    library, given = torchmetrics(), batches("classes")
    drawn = library.wrappers.BootStrapper(library.classification.MulticlassF1Score(3), num_bootstraps=3)
    named = {"each": library.classification.MulticlassF1Score(3, average="none"), "drawn": drawn, "total": total}
    figures = OwnFigures(OwnMetrics.of(named), CPU)
    for number, batch in enumerate(given):
        figures.add(number, *batch)
    found = figures.all(Collectives(World(), CPU))
    assert [*found] == ["test_each", "test_drawn_mean", "test_drawn_std", "test_total"]
    assert (len(found["test_each"]), None in found.values(), drawn.update_called) == (3, False, False)


def total(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.sum()


def test_what_cannot_be_merged_is_refused_by_name() -> None:
    library = torchmetrics()

    class Own(library.Metric):  # type: ignore[misc, name-defined]
        def __init__(self, default: Any = None, reduction: Any = None) -> None:
            super().__init__()
            self.total, self.kept = torch.zeros(()), {"inputs": [torch.zeros(())]}
            if default is not None:
                self.add_state("count", default, reduction)

        def update(self, outputs: Tensor, targets: Tensor) -> None:
            self.count = getattr(self, "count", 0) + len(outputs)

        def compute(self) -> Tensor:
            return self.count

    class Total(Own):
        def update(self, outputs: Tensor, targets: Tensor) -> None:
            super().update(outputs, targets)
            self.total = self.total + outputs.sum()

    class Hidden(Own):
        def update(self, outputs: Tensor, targets: Tensor) -> None:
            super().update(outputs, targets)
            self.kept["inputs"].append(outputs.sum())

        def compute(self) -> Tensor:
            return sum(self.kept["inputs"]) / self.count

    zero, error = torch.tensor(0.0), library.classification.MulticlassAccuracy(3)
    for metric, found in [
        (Own(), "Own.*has no state"),
        (Own(torch.tensor(1.0), "sum"), "count is summed, and does not begin at 0"),
        (Own(zero, lambda each: each.sum(0)), "count has a reduction of its own"),
        (Own(zero), r"Own.*gives tensor\(\[7., 7.\]\), and 14.0"),
        (Total(zero, "sum"), "outside of its states: total is"),
        (Hidden(zero, "sum"), "Hidden.*where one object counts all batches"),
        (library.wrappers.Running(error, 2), "Running.*the last few batches"),
        (library.wrappers.MinMaxMetric(error), "MinMaxMetric.*all evaluations"),
    ]:
        kind = "numbers" if isinstance(metric, Own) else "classes"
        with pytest.raises(UserError, match=f"it.*{found}"):
            merged(metric, batches(kind)[:2], compared=True)

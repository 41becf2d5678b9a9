"""The figures over runs that differ in their seed alone: which runs are counted, and what is said of them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ddp_core.record.figures import family_of, over_seeds
from tests.support.records import EXPERIMENT, a_record


def run(seed: int, loss: float, **fields: Any) -> dict[str, Any]:
    experiment = EXPERIMENT.model_copy(update={"seed": seed}).model_dump(mode="json")
    return a_record(status="completed", result={"test_loss": loss, "steps": 4}) | {"experiment": experiment} | fields


def test_mean_and_deviation_are_told() -> None:
    records = [run(seed, loss) for seed, loss in enumerate([1.0, 2.0, 3.0, 4.0])]
    found = over_seeds([*records, run(0, 9.0), run(9, 9.0, status="failed")])
    assert found is not None
    assert (found.seeds, found.left_out) == ([0, 1, 2, 3], 0), "of each seed the first that is completed"
    (figure,) = found.figures
    assert (figure.runs, figure.mean, figure.deviation) == (4, 2.5, pytest.approx(math.sqrt(5 / 3)))
    assert figure.words == "2.5 ± 1.3 (4)"
    assert over_seeds(records[:1]) is None


@pytest.mark.parametrize(
    "other",
    [
        {"data_sha256": "b"},
        {"fingerprint": {"numerics": "portable", "numerics_rules": 2}},
        {"source": {"files": {"mine.py": "b"}, "experiment": "mine.py"}},
        {"init_from": {"given": "w.pt", "sha256": "b"}},
        {"forked_from": {"given": "RUN", "weights_sha256": "b"}},
    ],
)
def test_runs_that_differ_in_more_than_their_seed_are_left_out(other: dict[str, Any]) -> None:
    alike, others = [run(0, 1.0), run(1, 3.0)], [run(7, 50.0, **other), run(0, 50.0, **other), run(7, 51.0, **other)]
    assert len({family_of(record) for record in [*alike, *others]}) == 1
    found = over_seeds([*others[:1], *alike, run(2, 2.0), *others[1:]])
    assert found is not None
    assert (found.seeds, found.left_out, found.figures[0].mean) == ([0, 1, 2], 3, 2.0)
    assert found.table("mine").splitlines()[0].endswith("or numerics: 3")
    assert over_seeds([run(0, 1.0), run(1, 2.0, **other)]) is None


def test_another_setting_makes_another_family() -> None:
    wider = run(1, 1.0)
    wider["experiment"]["global_batch_size"] *= 2
    assert family_of(run(0, 1.0)) == family_of(run(1, 2.0)) != family_of(wider)

"""A loss that is not finite ends the run before its step, or its step is skipped."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from ddp_core.base.digests import weights_digest
from ddp_core.config.layout import Layout
from ddp_core.observe.step import StepObserver, StepReport
from ddp_core.sampler import GlobalOrder
from tests.core.trainers import builders
from tests.support.wording import refusing


@pytest.mark.parametrize("layout", [Layout(), Layout(kind="dp", nproc_per_node=2)], ids=lambda layout: layout.kind)
@pytest.mark.parametrize("reduction", ["plain", "exact"])
def test_a_loss_that_is_not_finite_ends_the_run_before_the_step(layout: Layout, reduction: str) -> None:
    data = builders.samples(64)
    record = builders.experiment(reduction=reduction, epochs=2)
    ids = GlobalOrder(64, 0).ids(0, 32, 48)
    data.inputs[ids[13]] = math.nan
    with builders.trainer_of(record, layout=layout, train=data) as trainer:
        with refusing() as raised:
            trainer.train()
        assert all(str(number) in str(raised.value) for number in ids[12:16])
        assert trainer.state.step == 2
        weights = weights_digest(trainer.state.model.state_dict())
    good = builders.finished(builders.experiment(reduction=reduction, max_steps=2), layout=layout)
    assert weights == weights_digest(good.state.model.state_dict())


class RaisesAtBadLosses(StepObserver):
    def losses_read(self, reports: Sequence[StepReport]) -> None:
        if not all(report.is_finite for report in reports):
            raise RuntimeError("the observer's own words")


def test_a_bad_loss_is_what_ends_the_run_where_an_observer_raises_at_it() -> None:
    data = builders.samples(64)
    data.inputs[GlobalOrder(64, 0).ids(0, 32, 48)[13]] = math.nan
    with (
        builders.trainer_of(builders.experiment(), train=data, observers=(RaisesAtBadLosses(),)) as trainer,
        refusing() as raised,
    ):
        trainer.train()
    assert "the observer's own words" in str(raised.value.__context__)


@pytest.mark.parametrize("layout", [Layout(), Layout(kind="dp", nproc_per_node=2)], ids=lambda layout: layout.kind)
@pytest.mark.parametrize("reduction", ["plain", "exact"])
def test_a_skipped_step_is_told_and_changes_neither_weights_nor_buffers(
    layout: Layout, reduction: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The forward of the bad batch has made NaN of the batch-norm statistics."""
    data, recorder = builders.samples(64), builders.Recorder()
    data.inputs[GlobalOrder(64, 0).ids(0, 32, 48)[13]] = math.nan
    record, details = (
        builders.experiment(reduction=reduction),
        {"train": data, "on_nan": "skip", "observers": (recorder,)},
    )
    with builders.trainer_of(record, builders.batch_norm_and_dropout, layout, **details) as recorder.trainer:
        recorder.trainer.train()
    assert [moment for moment, step in recorder.seen if step == 2] == [*builders.MOMENTS[:3], "skipped", "after_step"]
    assert ("skipped", 1) not in recorder.seen
    assert [report.is_finite for report in recorder.reports] == [True, True, False, True]
    assert "step skipped" in capsys.readouterr().out
    last = recorder.trainer.state.position.last_epoch_loss
    assert math.isfinite(last)
    before, after = (recorder.weights[recorder.seen.index((moment, 2))] for moment in ("before_step", "after_step"))
    assert after == before
    assert all(value.isfinite().all() for value in recorder.trainer.state.model.state_dict().values())

"""A callback freezes and unfreezes parameters: training goes on with the new choice, or says why it cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from torch import Tensor, nn

from ddp_core.observe.callback import Callback, Moment
from tests.core.trainers.builders import experiment, mlp, trainer_of
from tests.support.wording import refusing


class Switches(Callback):
    """Decides after some steps whether the first weight is trained from then on, and keeps its value after each."""

    ranks = "all"

    def __init__(self, is_trained: Mapping[int, bool]) -> None:
        self.is_trained = is_trained
        self.values: list[Tensor] = []

    def on_step(self, moment: Moment) -> None:
        weight = moment.model.get_parameter("0.weight")
        self.values.append(weight.detach().clone())
        weight.requires_grad_(self.is_trained.get(moment.step, weight.requires_grad))


def frozen(*names: str) -> nn.Module:
    model = mlp()
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


@pytest.mark.parametrize("reduction", ["exact", "plain"])
def test_training_goes_on_with_what_is_trained_from_then_on(reduction: str, capsys: pytest.CaptureFixture[str]) -> None:
    switches = Switches({2: False, 3: True})
    record = experiment(reduction=reduction, optimizer={"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1})
    with trainer_of(record, callbacks=[switches]) as trainer:
        trainer.train()
    first, second, third, fourth = switches.values
    assert (first.equal(second), second.equal(third), third.equal(fourth)) == (False, True, False)
    said = capsys.readouterr().out
    assert "from step 3 on: 0.weight is frozen now" in said
    assert "from step 4 on: 0.weight is trained now" in said


@pytest.mark.parametrize(
    ("build", "is_trained"),
    [(lambda: frozen("0.bias", "2.weight", "2.bias"), False), (lambda: frozen("0.weight"), True)],
    ids=["the last one is frozen", "the optimizer has not got it"],
)
def test_what_cannot_be_trained_further_is_refused(build: Callable[[], nn.Module], is_trained: bool) -> None:
    with trainer_of(experiment(reduction="exact"), build, callbacks=[Switches({2: is_trained})]) as trainer:
        with refusing():
            trainer.train()
        assert trainer.state.step == 2

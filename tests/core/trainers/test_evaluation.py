"""An evaluation counts every sample once, on any number of ranks; when there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ddp_core.config.experiment import Evaluation
from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.world import World
from ddp_core.model.losses import class_hits, cross_entropy
from ddp_core.trainers.evaluation import evaluate
from tests.core.trainers.builders import CPU, experiment, finished, mlp, samples


@pytest.mark.parametrize("count", [1, 3, 5, 10, 101])
def test_evaluation_counts_every_sample_once(count: int) -> None:
    test, model = samples(count, seed=3), mlp()

    def forward(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert not model.training
        assert not torch.is_grad_enabled()
        outputs = model(inputs)
        return outputs, targets, cross_entropy(outputs, targets)

    def result(**settings: Any) -> dict[str, float]:
        collectives = Collectives(World(), CPU)
        return evaluate(model, forward, class_hits, test, Evaluation(**settings), collectives)

    found = result(samples_per_batch=4)
    assert model.training
    outputs = model(test.inputs)
    expected = functional.cross_entropy(outputs.double(), test.targets).item()
    assert found["test_loss"] == pytest.approx(expected, rel=1e-5)
    assert found["test_accuracy"] == (outputs.argmax(1) == test.targets).sum().item() / count
    assert result(samples_per_batch=4, where="rank0") == found


@pytest.mark.parametrize(
    ("settings", "forwards"),
    [({"samples_per_batch": 2}, 2), ({"samples_per_batch": 9}, 1), ({"samples_per_batch": 2, "where": "rank0"}, 5)],
    ids=["some ranks have fewer", "some ranks have none", "rank 0 has all"],
)
def test_ranks_that_keep_pace_run_as_many_batches_and_count_each_once(settings: dict[str, Any], forwards: int) -> None:
    test, model = samples(9, seed=3), mlp()
    calls: list[int] = []
    tables: list[Tensor] = []

    class Apart(Collectives):
        """Ranks of which each runs after the other, and sees its own part of a sum alone."""

        def sum_(self, tensor: Tensor) -> Tensor:
            tables.append(tensor.clone())
            return tensor

    def forward(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        calls[-1] += 1
        outputs = model(inputs)
        return outputs, targets, cross_entropy(outputs, targets)

    for world_size in (1, 3):
        for rank in range(world_size):
            calls.append(0)
            apart = Apart(World(rank=rank, world_size=world_size), CPU)
            evaluate(model, forward, class_hits, test, Evaluation(**settings), apart, keep_pace=True)
    assert calls[1:] == [forwards] * 3
    assert torch.equal(tables[0], torch.stack(tables[1:]).sum(0))


def test_an_epoch_ends_with_an_evaluation_and_a_mean_over_its_samples() -> None:
    trainer = finished(experiment(epochs=2), test=samples(30, seed=9))
    assert trainer.state.position.evaluation.keys() == {"test_loss", "test_accuracy"}
    assert trainer.state.position.best >= trainer.state.position.evaluation["test_accuracy"] > 0
    frozen = finished(experiment(epochs=1, optimizer={"lr": 1e-30}), train=samples(64))
    data = samples(64)
    expected = functional.cross_entropy(frozen.state.model(data.inputs), data.targets).item()
    assert frozen.state.position.last_epoch_loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("length", [{"epochs": 3}, {"epochs": 5, "max_steps": 6}], ids=["epochs", "max_steps"])
def test_what_a_run_ends_with_is_evaluated_whenever_that_is(length: dict[str, int]) -> None:
    """By `every_epochs` no epoch of these runs is due."""
    evaluation = Evaluation(every_epochs=4)
    trainer = finished(experiment(evaluation=evaluation, **length), test=samples(30, seed=9))
    assert trainer.state.position.evaluation == trainer.evaluator.evaluate()

"""When a run evaluates, and on what: the model, and its averaged weights where there are any."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ddp_core.base.errors import UserError
from ddp_core.base.seeds import EvaluationSeed
from ddp_core.base.trees import Tree
from ddp_core.data.splits import first_items
from ddp_core.observe.metrics import readable
from ddp_core.observe.step import StepBatch, StepObserver
from ddp_core.reduction.refusal import DependsOnLayout
from ddp_core.reduction.watching import WrittenParameters
from ddp_core.trainers.evaluation import evaluate
from ddp_core.trainers.strategy import Strategy
from ddp_core.trainers.train_state import Steps

TRIED_BATCHES = 2
"""How many batches an evaluation has where the run is only tried."""


class Evaluator(StepObserver):
    """Evaluates at the end of every `every_epochs`-th epoch, and of the run."""

    def __init__(self, strategy: Strategy, steps: Steps) -> None:
        self._strategy, self._steps = strategy, steps
        self._job, self._state, self._clock = strategy.job, strategy.state, strategy.clock

    def epoch_done(self, batch: StepBatch) -> None:
        with self._clock.aside():
            self._strategy.settle_buffers()
            if (batch.epoch + 1) % self._job.experiment.evaluation.every_epochs == 0 or self._steps.are_done:
                self._evaluate_epoch(batch)

    def settle(self, batch: StepBatch) -> None:
        # A callback may have ended the run after an epoch without an evaluation.
        if self._steps.are_done and not self._state.is_evaluated:
            with self._clock.aside():
                self._evaluate_epoch(batch)

    def _evaluate_epoch(self, batch: StepBatch) -> None:
        """Evaluate, keep the figures, write them to the metrics, and print them."""
        job, state = self._job, self._state
        state.take_evaluation(self.evaluate(), job.experiment.best)
        self._strategy.seeds.after_evaluation(batch.epoch)
        job.metrics.write("evaluation", step=state.step, epoch=batch.epoch, **state.position.evaluation)
        loss = state.position.last_epoch_loss
        figures = [*([] if loss is None else [f"train loss {loss:.4f}"]), *readable(state.position.evaluation)]
        job.console.say(f"epoch {batch.epoch + 1:3d}  step {state.step:6d}  " + "  ".join(figures))

    def evaluate(self) -> dict[str, Any]:
        """The figures over the held-out samples, `ema_` before those of averaged weights; the same on every layout."""
        figures = self._figures_of(self._state.model)
        if self._state.average is not None:
            averaged = self._figures_of(self._state.average.module)
            figures |= {f"ema_{name}": value for name, value in averaged.items()}
        return figures

    def _figures_of(self, model: nn.Module) -> dict[str, Any]:
        """Loss, for classification accuracy, and the experiment's own metrics."""
        job, splits, state = self._job, self._job.parts.splits, self._state
        if splits.test is None:
            return {}
        settings, ownership, test = job.experiment.evaluation, state.ownership, splits.test
        if job.is_tried:
            test = first_items(test, TRIED_BATCHES * settings.samples_per_batch)

        def forward(inputs: Tree, targets: Tree) -> tuple[Tree, Tree, Tensor]:
            with ownership.forward_alone():
                return self._strategy.passes.outputs_and_loss(model, inputs, targets)

        try:
            return evaluate(
                model,
                forward,
                job.parts.hits,
                test,
                settings,
                job.collectives,
                splits.collate,
                job.parts.metrics,
                keep_pace=not ownership.has_whole_weights,
                seed=EvaluationSeed(self._strategy.seeds, self._steps.last_epoch),
                written=WrittenParameters(model, "evaluation batch") if job.is_exact else None,
                weights=splits.test_weights,
            )
        except DependsOnLayout as error:
            place = job.collectives.world.place
            raise UserError(f"evaluation after step {state.step}, {place}: {error}") from None
        finally:
            ownership.forwards_done()

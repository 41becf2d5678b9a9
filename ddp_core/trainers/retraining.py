"""What happens where a callback freezes or unfreezes parameters: all ranks go on with the new choice, or none does."""

from __future__ import annotations

from ddp_core.base.errors import UserError
from ddp_core.observe.step import StepBatch, StepObserver
from ddp_core.reduction.watching import TrainedParameters, describe_changes
from ddp_core.trainers.step_losses import not_on_all
from ddp_core.trainers.strategy import Strategy


class Retraining(StepObserver):
    """Looks at the model's flags `requires_grad` before each step."""

    def __init__(self, strategy: Strategy) -> None:
        self._job, self._strategy, self._losses = strategy.job, strategy, strategy.losses
        self._trained = TrainedParameters(strategy.model)

    def before_step(self, batch: StepBatch) -> None:
        """Train from this step on what the flags say.

        Raises UserError where ranks differ, and on every rank where the optimizer would not update a parameter that is
        trained now, and where nothing is trained any more.
        """
        if not (changes := self._trained.changes()):
            return
        model, where = self._strategy.model, self._strategy.where
        self._strategy.refuse_to_retrain(changes)
        if not self._losses.all_retrain() or len({*map(str, self._job.collectives.gather(changes))}) > 1:
            raise not_on_all(f"{where}: {describe_changes(changes)}, and not the same on all ranks")
        updated = {id(each) for group in self._strategy.state.optimizer.param_groups for each in group["params"]}
        for name, parameter in model.named_parameters():
            parameter.grad = None  # that of the last step would go on changing a parameter that is frozen now
            if parameter.requires_grad and id(parameter) not in updated:
                raise UserError(
                    f"{where}: {name} is trained now, but no group of the optimizer has it, so it would stay as it is: "
                    "let the experiment's own `optimizer` take all of the model's parameters"
                )
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UserError(
                f"{where}: {describe_changes(changes)}, so that nothing is trained any more: leave one parameter"
            )
        self._strategy.retrain()
        self._trained = TrainedParameters(model)
        self._job.console.say(f"from step {batch.step + 1} on: {describe_changes(changes)}")

"""The update of the weights: learning rate, clipping, the optimizer's step, the schedule's, and the weights' average.

Only this file calls the optimizer and the schedule.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ddp_core.base.user_code import user_code
from ddp_core.config.experiment import Experiment, Schedule
from ddp_core.trainers.train_state import TrainState


class WeightUpdate:
    """Updates the weights of a state from the gradients in `.grad`.

    `clip(max_norm)` limits the norm of the gradients.

    A built-in schedule sets each parameter group's rate, from the rate that the group was made with. A schedule of the
    experiment's own takes a step after each update, but not where the update was skipped.
    """

    def __init__(
        self,
        experiment: Experiment,
        state: TrainState,
        steps_per_epoch: int,
        clip: Callable[[float], object],
    ) -> None:
        self._state, self._clip_norm = state, experiment.clip_norm
        self._clip = clip
        self._rule = experiment.schedule if isinstance(experiment.schedule, Schedule) else None
        self._steps = (steps_per_epoch, experiment.total_steps(steps_per_epoch))
        self._has_stepped = False
        groups = state.optimizer.param_groups
        self._base_rates = [float(group["lr"]) for group in groups]
        state.learning_rate = self._base_rates[0]

    def make(self, step: int) -> None:
        """Make the update of `step`, counted from 0 over the whole run."""
        state = self._state
        groups = state.optimizer.param_groups
        if self._rule is not None:
            for group, base in zip(groups, self._base_rates, strict=True):
                group["lr"] = self._rule.rate(base, step, *self._steps)
        state.learning_rate = float(groups[0]["lr"])
        if state.scaler is not None:
            state.scaler.unscale_(state.optimizer)
        if self._clip_norm is not None:
            self._clip(self._clip_norm)
        with user_code("your optimizer"):
            if state.scaler is None:
                state.optimizer.step()
            elif not self._step_scaled(state.scaler):
                return
        if state.schedule is not None:
            with user_code("your schedule"):
                state.schedule.step()
        if state.average is not None:
            state.average.update_parameters(state.model)

    def _step_scaled(self, scaler: torch.amp.GradScaler) -> bool:
        """Step with scaled gradients, unless one of them overflowed; returns whether the weights were updated."""
        state = self._state
        if self._has_stepped and state.schedule is None and state.average is None:
            # Nothing depends on the answer, and on CUDA reading the scale makes the host wait for the device.
            scaler.step(state.optimizer)
            scaler.update()
            return True
        before, is_fresh = scaler.get_scale(), not state.optimizer.state
        scaler.step(state.optimizer)
        scaler.update()
        made = scaler.get_scale() >= before
        self._has_stepped = self._has_stepped or made
        if is_fresh and not made:
            # torch's fused SGD has made momentum buffers that it expects its first update to fill, which was skipped
            # (torch/optim/sgd.py: empty_like). Without them the next update is the first one again.
            state.optimizer.state.clear()
        return made

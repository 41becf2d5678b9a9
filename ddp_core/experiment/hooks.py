"""What an experiment's file adds to training beside model, data and loss: optimizer, schedule, metrics, callbacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ddp_core.base.errors import UserError
from ddp_core.base.user_code import user_code
from ddp_core.config.experiment import Optimizer, Schedule
from ddp_core.experiment.building import build
from ddp_core.experiment.file import LoadedExperiment, resolve
from ddp_core.model.optimizers import build_optimizer, require_schedules, require_trains
from ddp_core.observe.callback import Callback
from ddp_core.observe.step import StepBatch, StepObserver, StepReport


def optimizer_of(loaded: LoadedExperiment, model: nn.Module) -> torch.optim.Optimizer:
    """The experiment's optimizer, built-in or its own, over the model's parameters. Raises UserError."""
    settings = loaded.experiment.optimizer
    if isinstance(settings, Optimizer):
        with user_code("your model"):
            return build_optimizer(settings, model, loaded.experiment.global_batch_size)
    function = resolve(loaded, "optimizer", settings.name)
    optimizer = build(function, settings.options, {"model": model})
    require_trains(optimizer, model, _called("optimizer", settings.name))
    return optimizer  # type: ignore[no-any-return]


def schedule_of(loaded: LoadedExperiment, optimizer: torch.optim.Optimizer, samples: int) -> LRScheduler | None:
    """The experiment's own schedule for training on so many samples; None where a built-in rule sets the rate.

    Raises UserError.
    """
    experiment, settings = loaded.experiment, loaded.experiment.schedule
    if isinstance(settings, Schedule):
        return None
    steps_per_epoch = experiment.steps_per_epoch(samples)
    known = {
        "optimizer": optimizer,
        "total_steps": experiment.total_steps(steps_per_epoch),
        "steps_per_epoch": steps_per_epoch,
    }
    schedule = build(resolve(loaded, "schedule", settings.name), settings.options, known)
    require_schedules(schedule, optimizer, _called("schedule", settings.name))
    return schedule  # type: ignore[no-any-return]


def _called(kind: str, name: str) -> str:
    return kind if name == kind else f"{kind} {name}"


def metrics_of(loaded: LoadedExperiment) -> Callable[..., Any] | None:
    """The file's own `metrics(outputs, targets)`; None where it defines none."""
    own = loaded.namespace.get("metrics")
    return own if callable(own) else None


def callbacks_of(loaded: LoadedExperiment) -> tuple[list[Callback], list[StepObserver]]:
    """The callbacks and the step observers in the file's `callbacks`, a list or a function that returns one.

    Raises UserError for anything else.
    """
    own = loaded.namespace.get("callbacks")
    if own is None or isinstance(own, ModuleType):
        return [], []
    found = build(own, {}) if callable(own) else own
    if not isinstance(found, list | tuple):
        kind = f"returned a {type(found).__name__}" if callable(own) else f"is a {type(found).__name__}"
        raise UserError(f"callbacks in {loaded.path} {kind}; it is a list, or a function that returns one")
    for number, each in enumerate(found):
        if isinstance(each, type):
            raise UserError(
                f"callbacks[{number}] in {loaded.path} is the class {each.__name__}; write {each.__name__}()"
            )
        if not isinstance(each, Callback | StepObserver):
            raise UserError(
                f"callbacks[{number}] in {loaded.path} is a {type(each).__name__}; derive it from "
                "ddp_core.observe.callback.Callback or ddp_core.observe.step.StepObserver"
            )
        if isinstance(each, Callback) and each.ranks not in ("first", "all"):
            raise UserError(f"callbacks[{number}] in {loaded.path} has ranks={each.ranks!r}; it is 'first' or 'all'")
    callbacks = [each for each in found if isinstance(each, Callback)]
    return callbacks, [_UsersObserver(each) for each in found if not isinstance(each, Callback)]


class _UsersObserver(StepObserver):
    """A step observer of the user's."""

    _boundary = user_code("your step observer")

    def __init__(self, observer: StepObserver) -> None:
        self._observer = observer

    def before_step(self, batch: StepBatch) -> None:
        with self._boundary:
            self._observer.before_step(batch)

    def before_wait(self) -> None:
        with self._boundary:
            self._observer.before_wait()

    def gradients_done(self, batch: StepBatch, reports: Sequence[StepReport]) -> None:
        with self._boundary:
            self._observer.gradients_done(batch, reports)

    def skipped(self, batch: StepBatch) -> None:
        with self._boundary:
            self._observer.skipped(batch)

    def after_step(self, batch: StepBatch) -> None:
        with self._boundary:
            self._observer.after_step(batch)

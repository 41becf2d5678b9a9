"""The functions that an experiment names: found, called with its options, and what they return checked.

They make the model, data set, loss, optimizer and schedule, and add metrics and callbacks to training.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ddp_core.base.errors import UserError, nearest_name
from ddp_core.base.user_code import LeftEarly, no_way_out, user_code
from ddp_core.config.experiment import Component, Optimizer, Schedule, called
from ddp_core.data.builders import DATA
from ddp_core.data.splits import Splits
from ddp_core.experiment.file import SIGNATURES, LoadedExperiment, in_one_line, place_of
from ddp_core.model.builders import MODELS
from ddp_core.model.losses import LOSSES, Loss
from ddp_core.model.optimizers import build_optimizer, require_schedules, require_trains
from ddp_core.observe.callback import Callback
from ddp_core.observe.step import StepObserver, StepObservers

Kind = Literal["model", "data", "loss", "optimizer", "schedule"]

_BROUGHT: Mapping[Kind, Mapping[str, Callable[..., Any]]] = {
    "model": MODELS,
    "data": DATA,
    "loss": LOSSES,
}
"""The functions that `ddp_core` brings, by kind and name."""

_INJECTED: Mapping[str, tuple[str, ...]] = {
    "data": ("root",),
    "optimizer": ("model",),
    "schedule": ("optimizer", "total_steps", "steps_per_epoch"),
}
"""Parameters, by kind of function, that the run fills in and no experiment holds.

The `root` of a data set is the folder on this machine; the others exist only once the run has begun.
"""
_REQUIRED = {"optimizer": "model", "schedule": "optimizer"}
"""The parameter that a function of this kind must have: what it builds would otherwise belong to nothing."""


@dataclass(frozen=True)
class BuiltExperiment:
    """What training needs of an experiment: model, data, loss, optimizer, and what its file adds to them."""

    model: nn.Module
    loss: Loss
    splits: Splits
    optimizer: torch.optim.Optimizer
    """Over the model's parameters, on the device."""
    hits: Loss | None = None
    """How accuracy is counted: by the file's own function, or by the one that belongs to the loss."""
    schedule: LRScheduler | None = None
    """Over the optimizer; None where a built-in rule sets the rate."""
    metrics: Any = None
    """The file's own: a function, an object like one, or several by name; once they were tried, an `OwnMetrics`."""
    callbacks: Sequence[Callback] = ()
    observers: Sequence[StepObserver] = ()


def resolve(loaded: LoadedExperiment, kind: Kind, name: str) -> Callable[..., Any]:
    """The function that `name` means in this experiment: the file's own, or the one that `ddp_core` brings.

    Raises UserError, with the nearest known name, where there is no such function.
    """
    own: Any = loaded.namespace.get(name)
    # A torch.nn.Module can be called, and yet makes nothing.
    is_function = callable(own) and (isinstance(own, type) or not hasattr(own, "state_dict"))
    if is_function:
        if kind == "loss" and getattr(own, "__module__", None) == "torch.nn.functional":
            raise UserError(
                f"experiment {loaded.experiment.name}: {called('loss', name)} is torch.nn.functional's, which "
                f"averages; a loss here sums over samples: define one in {loaded.path} that calls "
                "it with reduction='sum'"
            )
        return own  # type: ignore[no-any-return]
    brought = _BROUGHT.get(kind, {})
    if name in brought:
        return brought[name]
    if own is not None and not isinstance(own, ModuleType):
        raise UserError(
            f"experiment {loaded.experiment.name}: `{name}` in {loaded.path} is a {type(own).__name__}; "
            f"write a function, `def {name}({SIGNATURES[kind]}): …`, so that each run makes it afresh"
        )

    define = f"define `def {name}({SIGNATURES[kind]}): …` there"
    if kind in ("optimizer", "schedule"):
        hint = f"{define}, or use a built-in one: {kind}={kind.capitalize()}(name=…)"
    elif name == kind:
        hint = f"{define}, or name one of ddp_core's: {', '.join(sorted(brought))}"
    else:
        hint = nearest_name(name, brought)
    setting = kind if kind == "loss" else f"{kind}.name"
    raise UserError(
        f"experiment {loaded.experiment.name}: {setting} is {name}, but {loaded.path} defines no function of that name"
        f"{' and ddp_core brings none' if brought else ''}; {hint}"
    )


def complete_options(component: Component, function: Callable[..., Any], kind: Kind) -> Component:
    """The component with the function's defaults for all missing options, in the order of the function's parameters.

    So the record of a run is complete, and `--set` reaches every option. Defaults that JSON cannot hold are left out.
    Raises UserError where the function lacks the parameter that its kind needs.
    """
    parameters = _parameters(function)
    needed = _REQUIRED.get(kind)
    if needed is not None and needed not in parameters:
        raise UserError(
            f"function {component.name} has no parameter `{needed}`: write `def {component.name}({needed}, …)`"
        )
    defaults = {}
    for name, parameter in parameters.items():
        if name not in _INJECTED.get(kind, ()) and parameter.default is not parameter.empty:
            with suppress(TypeError, ValueError):
                defaults[name] = json.loads(json.dumps(parameter.default, allow_nan=False))
    options = {name: component.options.get(name, value) for name, value in defaults.items()}
    return component.model_copy(update={"options": options | component.options})


def build(function: Callable[..., Any], options: Mapping[str, Any], injected: Mapping[str, Any] | None = None) -> Any:
    """Call a builder with an experiment's options, and with those `injected` values that it has parameters for.

    Raises UserError for an option that the builder does not know (with the nearest known name), for a missing option
    that it needs, and, with file and line, for an exception inside the builder.
    """
    parameters, injected = _parameters(function), injected or {}
    name = getattr(function, "__name__", str(function))
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    known = {
        key
        for key, parameter in parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    for option in options:
        if option in injected or (option not in known and not open_ended):
            others = known - injected.keys()
            hint = nearest_name(option, others) if others else "it takes none"
            raise UserError(f"{name} has no option {option}; {hint}")
    given = dict(options) | {key: value for key, value in injected.items() if key in known}
    missing = [key for key in known if parameters[key].default is inspect.Parameter.empty and key not in given]
    if missing:
        raise UserError(f"{name} needs the option {sorted(missing)[0]}; give it in the experiment file's options")
    try:
        with no_way_out(name):
            return function(**given)
    except (UserError, MemoryError):
        raise
    except LeftEarly as error:
        raise UserError(str(error)) from error
    except Exception as error:
        code = getattr(function, "__code__", None)
        place, hint, root = place_of(error, None if code is None else code.co_filename), "", injected.get("root")
        missing_file = error.filename if isinstance(error, FileNotFoundError) else None
        found = Path(missing_file).resolve() if isinstance(missing_file, str | Path) else None
        if root is not None and found is not None and found.is_relative_to(root.resolve()):
            hint = f"; the data folder is {root}: put the file there, or name another folder with --data-dir DIR"
        raise UserError(f"{place}: {name} raised {in_one_line(error)}{hint}") from error


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def optimizer_of(loaded: LoadedExperiment, model: nn.Module) -> torch.optim.Optimizer:
    """The experiment's optimizer, built-in or its own, over the model's parameters. Raises UserError."""
    settings = loaded.experiment.optimizer
    if isinstance(settings, Optimizer):
        with user_code("your model"):
            return build_optimizer(settings, model, loaded.experiment.global_batch_size)
    function = resolve(loaded, "optimizer", settings.name)
    optimizer = build(function, settings.options, {"model": model})
    schedule = loaded.experiment.schedule
    # A constant rate is the one that the optimizer was made with.
    is_rate_set = not isinstance(schedule, Schedule) or schedule.name != "constant" or schedule.warmup_steps > 0
    require_trains(optimizer, model, called("optimizer", settings.name), is_rate_set)
    return optimizer  # type: ignore[no-any-return]


def schedule_of(loaded: LoadedExperiment, optimizer: torch.optim.Optimizer, samples: int) -> LRScheduler | None:
    """The experiment's own schedule for training on so many samples; None where a built-in rule sets the rate."""
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
    require_schedules(schedule, optimizer, called("schedule", settings.name))
    return schedule  # type: ignore[no-any-return]


def callbacks_of(loaded: LoadedExperiment) -> tuple[list[Callback], list[StepObserver]]:
    """The callbacks and the step observers in the file's `callbacks`, a list or a function that returns one."""
    own = loaded.namespace.get("callbacks")
    if own is None or isinstance(own, ModuleType):
        return [], []
    found = build(own, {}) if callable(own) else own
    if not isinstance(found, list | tuple):
        kind = f"returned a {type(found).__name__}" if callable(own) else f"is a {type(found).__name__}"
        raise UserError(f"callbacks in {loaded.path} {kind}; it is a list, or a function that returns one")
    for number, each in enumerate(found):
        which = f"callbacks[{number}] in {loaded.path}"
        if isinstance(each, type):
            raise UserError(f"{which} is the class {each.__name__}; write {each.__name__}()")
        if not isinstance(each, Callback | StepObserver):
            raise UserError(
                f"{which} is a {type(each).__name__}; derive it from "
                "ddp_core.observe.callback.Callback or ddp_core.observe.step.StepObserver"
            )
        if isinstance(each, Callback) and each.ranks not in ("first", "all"):
            raise UserError(f"{which} has ranks={each.ranks!r}; it is 'first' or 'all'")
    callbacks = [each for each in found if isinstance(each, Callback)]
    observers = [each for each in found if isinstance(each, StepObserver)]
    return callbacks, [StepObservers(observers, user_code("your step observer"))] if observers else []

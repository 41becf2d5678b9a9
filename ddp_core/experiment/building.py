"""Calls the functions that an experiment names: with its options, and with one-line errors that say where."""

from __future__ import annotations

import inspect
import json
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ddp_core.base.errors import UserError, nearest_name

if TYPE_CHECKING:
    from ddp_core.config.experiment import Component

Kind = Literal["model", "data", "loss", "optimizer", "schedule"]

INJECTED: Mapping[str, tuple[str, ...]] = {
    "data": ("root",),
    "optimizer": ("model",),
    "schedule": ("optimizer", "total_steps", "steps_per_epoch"),
}
"""Parameters, by kind of function, that the run fills in and no experiment holds.

The data's `root` says where data are, not which; the others exist only once the run has begun.
"""
_REQUIRED = {"optimizer": "model", "schedule": "optimizer"}
"""The parameter without which a function of this kind would build for nothing."""


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
    defaults = {
        name: parameter.default
        for name, parameter in parameters.items()
        if name not in INJECTED.get(kind, ()) and parameter.default is not parameter.empty
    }
    plain = json.loads(json.dumps({name: value for name, value in defaults.items() if _fits_json(value)}))
    options = {name: component.options.get(name, value) for name, value in plain.items()}
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
        return function(**given)
    except (UserError, MemoryError):
        raise
    except Exception as error:
        code = getattr(function, "__code__", None)
        place = place_of(error, None if code is None else code.co_filename)
        hint = _in_data_folder(error, injected.get("root"))
        raise UserError(f"{place}: {name} raised {reason_of(error)}{hint}") from error


def _in_data_folder(error: BaseException, root: Path | None) -> str:
    """What to do about a file that a builder misses in the data folder `root`; nothing for any other exception."""
    if root is None or not isinstance(error, FileNotFoundError) or not isinstance(error.filename, str | Path):
        return ""
    if not Path(error.filename).resolve().is_relative_to(root.resolve()):
        return ""
    return f"; the data folder is {root}: put the file there, or name another folder with --data-dir DIR"


def place_of(error: BaseException, file: str | None) -> str:
    """'file:line' of the deepest point of the exception inside `file`, or of its deepest point at all."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if frame.filename == file] or frames
    return f"{inside[-1].filename}:{inside[-1].lineno}" if inside else str(file)


def reason_of(error: BaseException) -> str:
    """The exception in one line."""
    from pydantic import ValidationError

    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, ValidationError):
        from ddp_core.config.records import explain

        return f"{error.title}: {explain(error)}"
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return ": ".join(part for part in (type(error).__name__, " ".join(text.split())) if part)


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def _fits_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True

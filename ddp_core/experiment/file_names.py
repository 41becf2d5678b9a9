"""The names that an experiment file may define, and what is said about a name that only looks like one of them."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ddp_core.base.errors import UserError

if TYPE_CHECKING:
    from ddp_core.config.experiment import Experiment

SIGNATURES: Mapping[str, str] = {
    "model": "",
    "data": "",
    "loss": "outputs, targets",
    "optimizer": "model",
    "schedule": "optimizer",
    "metrics": "outputs, targets",
    "hits": "outputs, targets",
    "callbacks": "",
}
"""The functions of an experiment file, with the parameters that they are called with."""

_NAMES = ("experiment", *SIGNATURES, "collate")
_OTHER_WORDS = {"criterion": "loss", "dataset": "data", "datasets": "data", "optim": "optimizer"}
"""Words that people use for these functions, too different from their names to be found by spelling."""
_OWN_BY_DEFAULT = ("loss", "optimizer", "schedule")


def use_own_functions(experiment: Experiment, namespace: Mapping[str, Any]) -> Experiment:
    """The experiment with the file's `loss`, `optimizer` and `schedule` where it does not say which to use."""
    from ddp_core.config.experiment import Component

    own = {
        name: name if name == "loss" else Component(name=name)
        for name in _OWN_BY_DEFAULT
        if name not in experiment.model_fields_set and callable(namespace.get(name))
    }
    return experiment.model_copy(update=own)


def require_known_names(path: Path, source: str, namespace: Mapping[str, Any], experiment: Experiment) -> None:
    """Raises UserError for a name at the top of the file that nothing uses, and that was meant to be used.

    That is a function, class or list with nearly the name of one that a file may define, such as `optimiser`; and a
    value, such as a string, with the very name of a function. Never asked about: private names, names that the file or
    the experiment itself uses, and spellings of what the file also defines or the experiment sets.
    """
    tree = ast.parse(source)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    used |= {experiment.loss}
    used |= {part.name for part in (experiment.model, experiment.data, experiment.optimizer, experiment.schedule)}
    for name in dict.fromkeys(_defined(tree)):
        value = namespace.get(name)
        if name.startswith("_") or name in used or isinstance(value, ModuleType):
            continue
        if name in SIGNATURES:
            fits = callable(value) or (name == "callbacks" and isinstance(value, list))
            if name not in experiment.model_fields_set and not fits:
                also = f", or say `Experiment({name}={name})`" if name in _OWN_BY_DEFAULT else ""
                raise UserError(
                    f"experiment file {path} defines `{name}` as a {type(value).__name__}, which nothing uses; "
                    f"write `def {name}({SIGNATURES[name]}): …`{also}"
                )
            continue
        meant = _meant_by(name)
        if meant is None or meant in namespace or meant in experiment.model_fields_set:
            continue
        if callable(value) or isinstance(value, list):
            raise UserError(f"experiment file {path} defines `{name}`, which nothing uses; did you mean `{meant}`?")


def _meant_by(name: str) -> str | None:
    """The known name that another name is nearest to; None where it is near to none, or is one of them."""
    if name in _NAMES:
        return None
    if name.lower() in _OTHER_WORDS:
        return _OTHER_WORDS[name.lower()]
    return next(iter(difflib.get_close_matches(name.lower(), _NAMES, n=1, cutoff=0.8)), None)


def _defined(tree: ast.Module) -> Iterator[str]:
    """The names that the statements at the top of the file define, without imports and what has a decorator."""
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if not statement.decorator_list:  # a decorator may have registered the function somewhere
                yield statement.name
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))

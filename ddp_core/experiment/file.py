"""Experiment files: found by name or path, listed without being run, loaded with one-line errors.

An experiment file has a docstring, whose first line is the question it answers, and an assignment `experiment =
Experiment(...)`. It may define the functions in `SIGNATURES`, and those that its `experiment` names. Each name means
the file's own function first, else one of `ddp_core.model.builders`, `ddp_core.data.builders` or
`ddp_core.model.losses`.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from ddp_core.base.beneath import read_file
from ddp_core.base.errors import UserError, nearest_name
from ddp_core.base.extras import needs
from ddp_core.base.keyed_draws import watch_draws
from ddp_core.base.user_code import MODULE_PREFIX

if TYPE_CHECKING:  # `ddp list` answers without it
    from ddp_core.config.experiment import Experiment

_BESIDE = Path(__file__).resolve().parents[2]
INSTALLED = _BESIDE / ("experiments" if (_BESIDE / "pyproject.toml").is_file() else "ddp_experiments")
"""The project's own experiments: `experiments` in a checkout, else what the laboratory has installed, if anything."""

NONE = f"no folder `experiments` is here, and {needs('any other name', 'lab', 'samebits-lab')}"
"""What is said where no experiment can be found by a name."""

SEARCH = (Path("experiments"), INSTALLED)
"""Where a bare name is looked up: the folder `experiments` here, then the installed one."""

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


class Listed(NamedTuple):
    """An experiment file as `ddp list` shows it."""

    name: str
    question: str
    path: Path


class Served(NamedTuple):
    """Modules that a run has kept: the folder of their copies, and the place of each in it by full module name."""

    folder: str
    modules: dict[str, str]


@dataclass(frozen=True)
class LoadedExperiment:
    """An experiment with the file that it came from: the names defined there, its text as it was run, its question."""

    experiment: Experiment
    namespace: dict[str, Any]
    path: Path
    source: str
    question: str
    served: Served | None = None
    """For a recorded run, the copies of the modules that the file imports in the place of today's; else None."""


def find_experiment(name_or_path: str, search: Sequence[Path] = SEARCH) -> Path:
    """The file of the experiment of that name, or at that path. Raises UserError where there is none."""
    path = Path(name_or_path)
    if path.suffix == ".py":
        if path.is_file():
            return path
        raise UserError(f"experiment file {path} does not exist; `ddp list` shows the experiments that have a name")
    if path.name == name_or_path:
        for folder in search:
            if (folder / f"{name_or_path}.py").is_file():
                return folder / f"{name_or_path}.py"
    if name_or_path and path.is_dir():
        raise UserError(
            f"experiment {name_or_path}: this is a folder; give the path of an experiment file, which ends in .py, or "
            "a name that `ddp list` shows"
        )
    if path.name != name_or_path and path.with_suffix(".py").is_file():
        raise UserError(f"experiment {name_or_path}: a path ends in .py; did you mean {path.with_suffix('.py')}?")

    names = [listed.name for listed in list_experiments(search)]
    raise UserError(f"unknown experiment {name_or_path}; {nearest_name(name_or_path, names) if names else NONE}")


def list_experiments(search: Sequence[Path] = SEARCH) -> list[Listed]:
    """Every experiment in the search folders, by name; reads the files without running them.

    A file that is not valid Python is listed with the reason in place of its question.
    """
    found: dict[str, Listed] = {}
    for folder in search:
        for path in sorted(folder.glob("*.py")):
            if path.stem in found:
                continue
            try:
                tree = ast.parse(read_file(path))
            except (OSError, SyntaxError, ValueError) as error:
                line = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
                question = f"(cannot be read: {type(error).__name__}{line})"
            else:
                if not any("experiment" in _assigned(statement) for statement in tree.body):
                    continue
                question = _first_line(ast.get_docstring(tree))
            found[path.stem] = Listed(path.stem, question, path)
    return sorted(found.values())


def _first_line(docstring: str | None) -> str:
    return docstring.strip().partition("\n")[0] if docstring and docstring.strip() else "(no question: add a docstring)"


def load_experiment(name_or_path: str, search: Sequence[Path] = SEARCH) -> LoadedExperiment:
    """The experiment of that name, or in that file (a path that ends in .py). Raises UserError.

    A `loss`, `optimizer` or `schedule` that the file defines is used where the experiment does not name another.
    """
    path = find_experiment(name_or_path, search)
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"experiment file {path} cannot be read: {in_one_line(error)}") from None
    from ddp_core.config.experiment import Component, Experiment

    module = run_file(path, source)
    namespace = module.__dict__
    experiment = namespace.get("experiment")
    if not isinstance(experiment, Experiment):
        another = f"has an `experiment` that is a {type(experiment).__name__}"
        raise UserError(
            f"experiment file {path} {'defines no `experiment`' if experiment is None else another}; "
            "add `experiment = Experiment(name=..., model=..., data=..., ...)`"
        )
    _require_known_names(path, source, namespace, experiment)
    own = {
        name: name if name == "loss" else Component(name=name)
        for name in _OWN_BY_DEFAULT
        if name not in experiment.model_fields_set and callable(namespace.get(name))
    }
    experiment = experiment.model_copy(update=own)
    return LoadedExperiment(experiment, namespace, path, source, _first_line(module.__doc__))


def run_file(path: Path, source: str) -> ModuleType:
    """Execute the file as a module of its own, known to pickle and dataclasses under a name that no other file has.

    Raises UserError where the file raises.
    """
    full = path.resolve()
    module = ModuleType(f"{MODULE_PREFIX}{full.stem}_{hashlib.sha256(bytes(full)).hexdigest()[:8]}")
    module.__file__ = str(full)
    sys.modules[module.__name__] = module
    if str(full.parent) not in sys.path:
        # At the end of the path, so that files beside the experiment can be imported but hide no other module.
        sys.path.append(str(full.parent))
    watch_draws()
    try:
        # Some editors begin a file with a byte order mark.
        code = compile(source.removeprefix("\ufeff"), str(full), "exec")
        try:
            exec(code, module.__dict__)
        except RuntimeError as error:
            from ddp_core.base.torchvision_import import import_torchvision, lacks_operators

            if not lacks_operators(error):
                raise
            import_torchvision()
            exec(code, module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        raise UserError(f"{place_of(error, str(full))}: {in_one_line(error)}") from error
    return module


def place_of(error: BaseException, file: str | None) -> str:
    """'file:line' of the deepest point of the exception inside `file`, or of its deepest point at all."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if frame.filename == file] or frames
    return f"{inside[-1].filename}:{inside[-1].lineno}" if inside else str(file)


def in_one_line(error: BaseException) -> str:
    """The exception in one line."""
    from pydantic import ValidationError

    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, ValidationError):
        from ddp_core.config.records import explain

        return f"{error.title}: {explain(error)}"
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return ": ".join(part for part in (type(error).__name__, " ".join(text.split())) if part)


def _require_known_names(path: Path, source: str, namespace: Mapping[str, Any], experiment: Experiment) -> None:
    """Raises UserError for a name at the top of the file that nothing uses, and that was meant to be used.

    Such a name belongs to a function, class or list and is nearly one that a file may define, such as `optimiser`; or
    it is the very name of a function, and belongs to another value, such as a string. Let through are private names,
    names that the file or the experiment itself uses, and near spellings of what either of them also defines.
    """
    tree = ast.parse(source.removeprefix("\ufeff"))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    used |= {experiment.loss, "experiment", "collate"}
    used |= {part.name for part in (experiment.model, experiment.data, experiment.optimizer, experiment.schedule)}
    for name in dict.fromkeys(_defined(tree)):
        value = namespace.get(name)
        if name.startswith("_") or name in used or isinstance(value, ModuleType):
            continue
        if name in SIGNATURES:
            is_list = name == "callbacks" and isinstance(value, list)
            fits = callable(value) or is_list or (name == "metrics" and isinstance(value, Mapping) and value)
            if name not in experiment.model_fields_set and not fits:
                also = f", or say `Experiment({name}={name})`" if name in _OWN_BY_DEFAULT else ""
                raise UserError(
                    f"experiment file {path} defines `{name}` as a {type(value).__name__}, which nothing uses; "
                    f"write `def {name}({SIGNATURES[name]}): …`{also}"
                )
            continue
        near = difflib.get_close_matches(name.lower(), _NAMES, n=1, cutoff=0.8)
        meant = _OTHER_WORDS.get(name.lower()) or next(iter(near), None)
        if meant is None or meant in namespace or meant in experiment.model_fields_set:
            continue
        if callable(value) or isinstance(value, list):
            raise UserError(f"experiment file {path} defines `{name}`, which nothing uses; did you mean `{meant}`?")


def _defined(tree: ast.Module) -> Iterator[str]:
    """The names that the statements at the top of the file define, without imports and what has a decorator."""
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if not statement.decorator_list:  # a decorator may have registered the function somewhere
                yield statement.name
        else:
            yield from _assigned(statement)


def _assigned(statement: ast.stmt) -> list[str]:
    """The plain names that a statement gives a value with `=`."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign):
        return []
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]

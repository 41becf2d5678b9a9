"""Experiment files: found by name or path, listed without being run, loaded with one-line errors.

An experiment file has a docstring, whose first line is the question it answers, and an assignment `experiment =
Experiment(...)`. It may define the functions that its model, data set, loss, optimizer and schedule are named after;
models, data sets and losses that it does not define are looked up in `ddp_core.model.builders`,
`ddp_core.data.builders` and `ddp_core.model.losses`. `ddp_core.experiment.file_names` knows what else a file
may define.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from ddp_core.base.errors import UserError, nearest_name
from ddp_core.experiment.building import Kind, place_of, reason_of
from ddp_core.experiment.file_names import SIGNATURES, require_known_names, use_own_functions

if TYPE_CHECKING:
    from ddp_core.config.experiment import Experiment

_BESIDE = Path(__file__).resolve().parents[2]
INSTALLED = next(_BESIDE / name for name in ("ddp_experiments", "experiments") if (_BESIDE / name).is_dir())
"""The experiments that come with this package: `experiments` in a checkout, `ddp_experiments` in an installation."""

MODULE_PREFIX = "ddp_experiment_"
"""How the names of the modules begin that experiment files are run as."""


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
    """The modules of a recorded run that the file imports in the place of today's; None where it is no such run's."""


def default_search() -> tuple[Path, ...]:
    """Where a bare name is looked up: the folder `experiments` here, then the installed one."""
    return (Path("experiments"), INSTALLED)


def list_experiments(search: Sequence[Path] | None = None) -> list[Listed]:
    """Every experiment in the search folders, by name; reads the files without running them.

    Of two experiments with the same name, the one found first counts. A file that is not valid Python is listed with
    the reason in place of its question.
    """
    found: dict[str, Listed] = {}
    for folder in default_search() if search is None else search:
        for path in sorted(folder.glob("*.py")):
            question = None if path.stem in found else _question_of(path)
            if question is not None:
                found[path.stem] = Listed(path.stem, question, path)
    return sorted(found.values())


def load_experiment(name_or_path: str, search: Sequence[Path] | None = None) -> LoadedExperiment:
    """The experiment of that name, or in that file (a path that ends in .py).

    Raises UserError for an unknown name (with the nearest known name), a missing file, a file that raises (with the
    line), or a file without an `experiment`.
    """
    path = find_experiment(name_or_path, search)
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"experiment file {path} cannot be read: {reason_of(error)}") from None
    module = _run(path, source)
    experiment = module.__dict__.get("experiment")
    from ddp_core.config.experiment import Experiment

    if not isinstance(experiment, Experiment):
        what = (
            "defines no `experiment`"
            if experiment is None
            else f"has an `experiment` that is a {type(experiment).__name__}"
        )
        raise UserError(
            f"experiment file {path} {what}; add `experiment = Experiment(name=..., model=..., data=..., ...)`"
        )
    require_known_names(path, source, module.__dict__, experiment)
    experiment = use_own_functions(experiment, module.__dict__)
    return LoadedExperiment(experiment, module.__dict__, path, source, _first_line(module.__doc__))


def run_again(
    experiment: Experiment, path: Path, source: str, question: str, served: Served | None
) -> LoadedExperiment:
    """The experiment of another process, whose file is run here from that process's text of it.

    What the file says of the experiment does not count. Raises UserError where the file raises.
    """
    return LoadedExperiment(experiment, _run(path, source).__dict__, path, source, question, served)


def resolve(loaded: LoadedExperiment, kind: Kind, name: str) -> Callable[..., Any]:
    """The function that `name` means in this experiment: the file's own, or the one that `ddp_core` brings.

    Raises UserError, with the nearest known name, where there is no such function.
    """
    own = loaded.namespace.get(name)
    if callable(own) and not _is_built(own):
        if kind == "loss" and getattr(own, "__module__", None) == "torch.nn.functional":
            raise UserError(
                f"experiment {loaded.experiment.name}: loss {name} is torch.nn.functional's, which averages; a loss "
                f"here sums over samples: define one in {loaded.path} that calls it with reduction='sum'"
            )
        return own  # type: ignore[no-any-return]
    brought = _registry(kind)
    if name in brought:
        return brought[name]
    if _is_built(own):
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


def resolve_hits(loaded: LoadedExperiment) -> Callable[..., Any] | None:
    """How accuracy is counted: the file's own `hits(outputs, targets)`, or the loss's; None where neither exists."""
    own = loaded.namespace.get("hits")
    if callable(own):
        return own  # type: ignore[no-any-return]
    from ddp_core.model.losses import HITS

    return HITS.get(resolve(loaded, "loss", loaded.experiment.loss))


def resolve_collate(loaded: LoadedExperiment) -> Callable[..., Any] | None:
    """How a micro-batch's samples are put together: the file's own `collate(samples)`; None where it has none.

    Raises UserError for a `collate` that is no function.
    """
    own = loaded.namespace.get("collate")
    if own is None or callable(own):
        return own
    raise UserError(
        f"experiment file {loaded.path}: collate is {own!r}; let it be a function of a list of samples "
        "that returns (inputs, targets)"
    )


def _is_built(own: Any) -> bool:
    """Whether a name of the file stands for an object where a function or class is meant; modules do not count."""
    if own is None or isinstance(own, ModuleType):
        return False
    # A torch.nn.Module can be called, and yet is no builder; its class can be told without importing torch.
    return not callable(own) or (hasattr(own, "state_dict") and not isinstance(own, type))


def _registry(kind: Kind) -> Mapping[str, Callable[..., Any]]:
    if kind in ("optimizer", "schedule"):
        return {}
    if kind == "model":
        from ddp_core.model.builders import MODELS

        return MODELS
    if kind == "data":
        from ddp_core.data.builders import DATA

        return DATA
    from ddp_core.model.losses import LOSSES

    return LOSSES


def find_experiment(name_or_path: str, search: Sequence[Path] | None = None) -> Path:
    """The file of the experiment of that name, or at that path. Raises UserError where there is none."""
    path = Path(name_or_path)
    if path.suffix == ".py":
        if path.is_file():
            return path
        raise UserError(f"experiment file {path} does not exist; `ddp list` shows the experiments that have a name")
    folders = default_search() if search is None else search
    if path.name == name_or_path:
        for folder in folders:
            if (folder / f"{name_or_path}.py").is_file():
                return folder / f"{name_or_path}.py"
    elif path.with_suffix(".py").is_file():
        raise UserError(f"experiment {name_or_path}: a path ends in .py; did you mean {path.with_suffix('.py')}?")

    hint = nearest_name(name_or_path, [listed.name for listed in list_experiments(folders)])
    raise UserError(f"unknown experiment {name_or_path}; {hint}")


def _run(path: Path, source: str) -> ModuleType:
    """Execute the file as a module of its own, known to pickle and dataclasses under a name that no other file has."""
    full = path.resolve()
    module = ModuleType(f"{MODULE_PREFIX}{full.stem}_{hashlib.sha256(bytes(full)).hexdigest()[:8]}")
    module.__file__ = str(full)
    sys.modules[module.__name__] = module
    if str(full.parent) not in sys.path:
        # At the end of the path, so that files beside the experiment can be imported but hide no other module.
        sys.path.append(str(full.parent))
    try:
        exec(compile(source, str(full), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        raise UserError(f"{place_of(error, str(full))}: {reason_of(error)}") from error
    return module


def _question_of(path: Path) -> str | None:
    """The docstring's first line, a note for a broken file, or None for a file that is no experiment."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
        return f"(cannot be read: {type(error).__name__}{line})"
    if not any(_assigns_experiment(statement) for statement in tree.body):
        return None
    return _first_line(ast.get_docstring(tree))


def _assigns_experiment(statement: ast.stmt) -> bool:
    targets: Iterable[ast.expr] = ()
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = (statement.target,)
    return any(isinstance(target, ast.Name) and target.id == "experiment" for target in targets)


def _first_line(docstring: str | None) -> str:
    return docstring.strip().partition("\n")[0] if docstring and docstring.strip() else "(no question: add a docstring)"

"""Makes docs/reference/api.md from the docstrings of the code: `python -m tools.api_reference`.

The sources are read, not imported, so that signatures stand as they were written and the adapters need no packages of
others. What is described: the short list of `ddp_core`, then what the modules below have in their `__all__`.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "api.md"

FRONT = [
    *("Experiment", "Component", "Optimizer", "Schedule", "Splits", "InMemory", "Callback", "EarlyStopping", "Moment"),
    *("train", "Run", "load_model"),
    *("ElasticSampler", "MicroBatches", "ExactReduction", "Checkpointer", "load"),
]
"""The short list in the order in which a user learns it."""

EXPERIMENT_WORDS = {
    "ddp_core.config.experiment": ["Evaluation", "DdpOptions"],
    "ddp_core.data.splits": ["ByteImages", "content_digest"],
}
"""What an experiment's file may need beside the short list."""

OWN_LOOPS = [
    "ddp_core.sampler",
    "ddp_core.reduction",
    "ddp_core.checkpoint",
    "ddp_core.sharding",
    "ddp_core.distributed.process_group",
    "ddp_core.distributed.world",
    "ddp_core.adapters.dealing",
]
OTHERS_LOOPS = [
    f"ddp_core.adapters.{name}" for name in ("lightning", "fabric", "accelerate", "transformers", "torchft")
]
"""Their methods are called by the loops alone."""

BEGINNING = """\
# API

What the names of `ddp_core` take, return and raise. This page is made from the docstrings of the code:
`python -m tools.api_reference` writes it.

- [From `ddp_core`](#from-ddp_core): `from ddp_core import Experiment, train`. Each name is loaded when first asked
  for: `import ddp_core` alone loads no torch.
- [In an experiment's file](#in-an-experiments-file): what such a file may need beside these.
- [In your own loop, and in those of others](#in-your-own-loop-and-in-those-of-others): what else the sampler, the
  reduction and the checkpoints offer, and the adapters for Lightning, Accelerate, the Hugging Face Trainer and torchft.

A name that is not on this page is private: it may change without notice. `UserError` is
`ddp_core.base.errors.UserError`: a mistake that its one line helps to mend; the number in `UserError (3)` is the
[exit code](exit-codes.md) of a `ddp` that meets it. Shapes are written `[samples, …]`, times are in seconds, and
sizes in bytes, unless something else is said.
"""

_CONSTRAINTS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
_WIDTH = 100


class Definition(NamedTuple):
    """Where a name is defined: module, statement, and the docstring, which follows the statement of a value."""

    module: str
    node: ast.stmt
    text: str | None


def main() -> int:
    """Write the page."""
    PAGE.write_text(page())
    return 0


def page() -> str:
    """The page as the sources have it now."""
    parts = [BEGINNING, "## From `ddp_core`\n"]
    places = _front_places()
    parts += [_entry(name, places[name]) for name in FRONT]
    parts.append("## In an experiment's file\n")
    for module, names in EXPERIMENT_WORDS.items():
        parts += [f"`from {module} import {', '.join(names)}`\n", *(_entry(name, module) for name in names)]
    parts.append("## In your own loop, and in those of others\n")
    for module in [*OWN_LOOPS, *OTHERS_LOOPS]:
        names = [name for name in exported(module) if name not in FRONT]
        if names:
            parts += [f"### From `{module}`\n", *(_entry(name, module, level=4) for name in names)]
    return "\n".join(parts)


def exported(module: str) -> list[str]:
    """The `__all__` of a module. Raises LookupError where it has none."""
    for node in _tree(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    raise LookupError(f"{module} has no __all__")


def definition(module: str, name: str) -> Definition:
    """The definition of a name, also of one that the module imports. Raises LookupError where there is none."""
    body = _tree(module).body
    for node, after in _with_next(body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return Definition(module, node, ast.get_docstring(node))
        if isinstance(node, ast.Assign | ast.AnnAssign) and ast.unparse(_target(node)) == name:
            return Definition(module, node, _text_of(after))
    for part in ast.walk(_tree(module)):
        if isinstance(part, ast.ImportFrom) and name in [alias.name for alias in part.names]:
            source = _absolute(module, part)
            if source.startswith("ddp_core"):
                return definition(source, name)
    raise LookupError(f"{module} does not define {name}")


def _front_places() -> dict[str, str]:
    (table,) = [
        node.value
        for node in _tree("ddp_core").body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_PLACES"
    ]
    places: dict[str, str] = ast.literal_eval(table)
    return places


@cache
def _tree(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _absolute(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = module.split(".") if ROOT.joinpath(*module.split(".")).is_dir() else module.split(".")[:-1]
    return ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])


def _with_next(body: Sequence[ast.stmt]) -> Iterator[tuple[ast.stmt, ast.stmt | None]]:
    return zip(body, [*body[1:], None], strict=False)


def _target(node: ast.Assign | ast.AnnAssign) -> ast.expr:
    return node.targets[0] if isinstance(node, ast.Assign) else node.target


def _text_of(node: ast.stmt | None) -> str | None:
    """The docstring that follows a value or a field."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return inspect.cleandoc(node.value.value)
    return None


class _Spelled(ast.NodeTransformer):
    """Puts `Literal["exact", "plain"]` in the place of a name that stands for it."""

    def __init__(self, module: str) -> None:
        self._module = module

    def visit_Name(self, node: ast.Name) -> ast.expr:
        with contextlib.suppress(LookupError):
            meant = definition(self._module, node.id).node
            if isinstance(meant, ast.Assign) and ast.unparse(meant.value).startswith("Literal["):
                return meant.value
        return node


def _entry(name: str, module: str, level: int = 3) -> str:
    """The part of the page about one name."""
    found = definition(module, name)
    node = _Spelled(found.module).visit(found.node)
    parts = [f"{'#' * level} `{name}`\n"]
    if isinstance(node, ast.FunctionDef):
        parts.append(_code(name, node))
    elif not isinstance(node, ast.ClassDef):
        parts.append(f"```python\n{ast.unparse(node)}\n```\n")
    elif (constructor := _constructor(node)) is not None:
        parts.append(_code(name, constructor))
    parts.append(_prose(found.text, f"{module}.{name}"))
    if isinstance(node, ast.ClassDef):
        parts += _members(node, f"{module}.{name}", only_properties=module in OTHERS_LOOPS)
    return "\n".join(parts)


def _members(node: ast.ClassDef, name: str, only_properties: bool) -> Iterator[str]:
    fields = [*_fields(node), *_attributes(node)]
    if fields:
        yield "Fields, which are also its arguments:\n" if _is_record(node) else "Attributes:\n"
        yield "\n".join(_listed(field, text) for field, text in fields) + "\n"
    for method in _methods(node):
        is_property = any(ast.unparse(decorator).endswith("property") for decorator in method.decorator_list)
        if is_property:
            yield f"**`.{method.name}{f': {ast.unparse(method.returns)}' if method.returns else ''}`**\n"
        elif only_properties:
            continue
        else:
            yield _code(f".{method.name}", method)
        yield _prose(ast.get_docstring(method), f"{name}.{method.name}")


def _is_record(node: ast.ClassDef) -> bool:
    """Whether the fields are what the class is called with."""
    marks = [*map(ast.unparse, node.decorator_list), *map(ast.unparse, node.bases)]
    return any(mark.startswith("dataclass") or mark in ("Frozen", "NamedTuple") for mark in marks)


def _methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    """The public methods with a docstring; one without takes its meaning from the class that it is made for."""
    for method in node.body:
        if not isinstance(method, ast.FunctionDef) or method.name.startswith("_") or not ast.get_docstring(method):
            continue
        if not any(ast.unparse(decorator).endswith(".setter") for decorator in method.decorator_list):
            yield method


def _constructor(node: ast.ClassDef) -> ast.FunctionDef | None:
    """The `__init__` of the class, where it writes one."""
    found = [method for method in node.body if isinstance(method, ast.FunctionDef) and method.name == "__init__"]
    return found[-1] if found else None  # above it stand its overloads


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """The fields of a record, or the attributes of a class, as written; with their docstrings."""
    for statement, after in _with_next(node.body):
        if isinstance(statement, ast.AnnAssign) and not ast.unparse(statement.target).startswith("_"):
            yield _field(statement), _text_of(after) or ""


def _field(node: ast.AnnAssign) -> str:
    kind, value, limits = ast.unparse(node.annotation), node.value, ""
    if isinstance(node.annotation, ast.Subscript) and ast.unparse(node.annotation.value) == "Annotated":
        assert isinstance(node.annotation.slice, ast.Tuple)
        kind = ast.unparse(node.annotation.slice.elts[0])
    default = "" if value is None else ast.unparse(value)
    if isinstance(value, ast.Call) and ast.unparse(value.func) in ("Field", "field"):
        named = {word.arg: ast.unparse(word.value) for word in value.keywords if word.arg is not None}
        made = {"dict": "{}", "list": "[]"}.get(named.get("default_factory", ""), "")
        default = named.get("default", made)
        limits = " and ".join(f"{sign} {named[word]}" for word, sign in _CONSTRAINTS.items() if word in named)
    return f"`{ast.unparse(node.target)}: {kind}{f' = {default}' if default else ''}`{f' ({limits})' if limits else ''}"


def _attributes(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """What `__init__` sets and describes."""
    constructor = _constructor(node)
    for statement, after in _with_next(constructor.body if constructor is not None else []):
        text = _text_of(after)
        if isinstance(statement, ast.Assign | ast.AnnAssign) and text is not None:
            name = ast.unparse(_target(statement)).removeprefix("self.")
            if not name.startswith("_"):
                yield f"`.{name}`", text


def _listed(field: str, text: str) -> str:
    return textwrap.fill(
        f"- {field}{': ' if text else ''}{_escaped(' '.join(text.split()))}",
        width=120,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _code(name: str, node: ast.FunctionDef) -> str:
    """The signature, on one line where it fits; without `self`."""
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    end = f" -> {ast.unparse(node.returns)}" if node.returns is not None and node.name != "__init__" else ""
    words = _words(node.args)
    if words and words[0] in ("self", "cls"):
        del words[0]
    line = f"{name}({', '.join(words)}){end}"
    if len(line) > _WIDTH:
        line = f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){end}"
    return "```python\n" + "".join(f"@{decorator}\n" for decorator in decorators) + f"{line}\n```\n"


def _words(arguments: ast.arguments) -> list[str]:
    """Each parameter as it is written, with its default."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + [*arguments.defaults]
    words = [_word(argument, default) for argument, default in zip(positional, defaults, strict=True)]
    if arguments.posonlyargs:
        words.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg is not None:
        words.append(f"*{_word(arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        words.append("*")
    words += [_word(*pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg is not None:
        words.append(f"**{_word(arguments.kwarg, None)}")
    return words


def _word(argument: ast.arg, default: ast.expr | None) -> str:
    kind = f": {ast.unparse(argument.annotation)}" if argument.annotation is not None else ""
    equals = " = " if kind else "="
    return f"{argument.arg}{kind}{'' if default is None else equals + ast.unparse(default)}"


def _prose(text: str | None, whose: str) -> str:
    """The docstring as it stands. Raises LookupError where there is none."""
    if not text:
        raise LookupError(f"{whose} has no docstring")
    return _escaped(text) + "\n"


def _escaped(text: str) -> str:
    """Names like __len__ are not meant to be bold."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else part.replace("__", r"\_\_") for part in parts)


if __name__ == "__main__":
    sys.exit(main())

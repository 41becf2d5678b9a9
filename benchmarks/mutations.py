"""The functions of a file and their mutants: mutmut makes the small wrong changes; nothing is written anywhere."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Function:
    """A function or a method of a file; what is defined inside it belongs to it."""

    file: str
    """Relative to the root."""
    name: str
    """With its class: `GradientTree.push`."""
    line: int
    """Of its first decorator, or of its `def`: Python's own first line of a function."""
    body: int
    """The line at which its body begins: what is above are its arguments."""
    sha: str
    """Digest of its source."""


@dataclass(frozen=True)
class Mutant:
    """One small wrong change."""

    function: Function
    index: int
    """Among the mutants of the function, which are always the same ones for the same source."""
    start: int
    stop: int
    """What is replaced, as offsets into the file."""
    new: str

    @property
    def text(self) -> str:
        """The whole file with the change."""
        old = text_of(self.function.file)
        return old[: self.start] + self.new + old[self.stop :]

    def change(self) -> tuple[int, str, str]:
        """How many lines below the function's first one it is, and the changed lines before and after."""
        old = text_of(self.function.file)
        begin, end = old.rfind("\n", 0, self.start) + 1, (old + "\n").find("\n", self.stop)
        before = old[begin:end].splitlines()
        after = (old[begin : self.start] + self.new + old[self.stop : end]).splitlines()
        same = 0
        while before[same:] and after[same:] and before[same] == after[same]:
            same += 1
        before, after = before[same:], after[same:]
        while before and after and before[-1] == after[-1]:
            before, after = before[:-1], after[:-1]
        line = old.count("\n", 0, begin) + 1 + same
        one, other = (" ".join(map(str.strip, lines)).strip() for lines in (before, after))
        return line - self.function.line, one, other


@cache
def text_of(file: str) -> str:
    """A file's content as it was when it was first asked for; empty if there is none."""
    path = ROOT / file
    return path.read_text() if path.exists() else ""


def short_digest(text: str) -> str:
    """The first digits of a SHA-256: enough to see that something has changed."""
    return hashlib.sha256(text.encode()).hexdigest()[:10]


@cache
def functions_of(file: str) -> dict[str, Function]:
    """The functions of a file and the methods of its classes, by name."""
    lines = text_of(file).splitlines(keepends=True)
    found = {}
    for name, node in _definitions(ast.parse(text_of(file))):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        sha = short_digest("".join(lines[first - 1 : node.end_lineno]))
        found[name] = Function(file, name, first, node.body[0].lineno, sha)
    return found


def _definitions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions and methods by their names; of an overloaded one the definition with the code."""
    for node in tree.body:
        if _has_code(node):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{method.name}", method) for method in node.body if _has_code(method))


def _has_code(node: ast.stmt) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    return not any(isinstance(each, ast.Name) and each.id == "overload" for each in node.decorator_list)


@cache
def test_digest(test: str) -> str | None:
    """Digest of a test, named as pytest does: its function and what is not itself a test in its file; None: gone."""
    file, _, name = test.partition("::")
    name = name.partition("[")[0].rpartition("::")[2]
    lines = text_of(file).splitlines()
    tests = {node.name: node for _, node in _definitions(ast.parse(text_of(file))) if node.name.startswith("test")}
    if name not in tests:
        return None
    for other, node in tests.items():
        if other != name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            lines[first - 1 : node.end_lineno] = [""] * ((node.end_lineno or first) - first + 1)
    return short_digest("\n".join(line for line in lines if line))


def mutants_of(file: str) -> dict[str, list[Mutant]]:
    """The mutants of each function of a file; [tool.mutmut] in pyproject.toml says which lines have none."""
    import libcst
    from libcst.metadata import MetadataWrapper, PositionProvider
    from mutmut.mutation.file_mutation import create_mutations

    text = text_of(file)
    module, mutations, *_ = create_mutations(file, text)
    places = MetadataWrapper(module, unsafe_skip_copy=True).resolve(PositionProvider)
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    names = {function.line: function for function in functions_of(file).values()}
    by_def = {node.lineno: name for name, node in _definitions(ast.parse(text))}
    assert len(by_def) == len(names), file
    found: dict[str, list[Mutant]] = {name: [] for name in functions_of(file)}
    for mutation in mutations:
        around = mutation.contained_by_top_level_function
        if not isinstance(around, libcst.FunctionDef):
            continue
        name = by_def[places[around.name].start.line]
        begin, end = places[mutation.original_node].start, places[mutation.original_node].end
        span = starts[begin.line - 1] + begin.column, starts[end.line - 1] + end.column
        new = module.code_for_node(mutation.mutated_node)
        found[name].append(Mutant(functions_of(file)[name], len(found[name]), *span, new))
    return found

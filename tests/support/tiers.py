"""In which tier a test is: the command that runs it."""

from __future__ import annotations

import ast
from pathlib import Path

FULL_FOLDERS = ("tests/lab/", "tests/foreign/", "tests/emulated/")
"""All tests below these folders are marked `full`: laboratory, other people's models, emulated CPUs."""

TIERS = {
    "slow": "rotation",
    "gpu": "gpu",
    "gpu2": "gpu",
    "cluster": "cluster",
    "docker": "docker",
    "extras": "extras",
    "full": "full",
}
"""The tier of each marker; the first one that a test has counts. Without a marker a test is in the tier `quick`."""

BY_SPEED = ("quick", "full", "extras", "docker", "cluster", "gpu", "rotation")


def tier_of(root: Path, file: str, function: str) -> str:
    """The tier of a test function's quickest case, from its source.

    A marker within `parametrize` is that of some cases: another one has none.
    """
    tree = ast.parse((root / file).read_text())
    found = {"full"} if file.startswith(FULL_FOLDERS) else set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(ast.unparse(target) == "pytestmark" for target in node.targets):
            found |= _markers(node.value)
        if isinstance(node, ast.FunctionDef) and node.name == function:
            found |= {marker for decorator in node.decorator_list for marker in _markers(decorator)}
    return next((tier for marker, tier in TIERS.items() if marker in found), "quick")


def _markers(node: ast.expr) -> set[str]:
    """The names of the markers in `pytest.mark.NAME`, `pytest.mark.NAME(…)`, or a list of these."""
    if isinstance(node, ast.List):
        return {marker for each in node.elts for marker in _markers(each)}
    call = node.func if isinstance(node, ast.Call) else node
    return {call.attr} if isinstance(call, ast.Attribute) and ast.unparse(call.value) == "pytest.mark" else set()

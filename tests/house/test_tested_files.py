"""Each file of ddp_core has a test module of its name, or is named in the docstring of one that notices its breaks."""

from __future__ import annotations

import ast
import re

from tests.support.commands import ROOT

# By room, files that nobody has seen a fast test fail for when they are broken. The list only gets shorter.
WITHOUT = {
    "adapters": "accelerate fabric lightning transformers",
    "cli": "entry prepare train_command",
    "launch": "nodes supervision",
    "live": "launch workers",
    "record": "run_json",
    "run": "evaluating explaining recovery repeater",
    "trainers": "distributed sharded",
}


def named_in(docstring: str) -> set[str]:
    """The files in a sentence such as: Tests launch/agent.py and launch/nodes.py, too."""
    sentences = re.findall(r"\bTests ([\w/., ]+\.py), too\.", " ".join(docstring.split()))
    return {name for sentence in sentences for name in re.findall(r"\w+/\w+\.py", sentence)}


def test_it_is_told_which_module_tests_a_file() -> None:
    files = {f"{file.parent.name}/{file.name}" for file in (ROOT / "ddp_core").glob("*/[!_]*.py")}
    modules = list((ROOT / "tests").rglob("test_*.py"))
    by_name = {f"{module.parent.name}/{module.name.removeprefix('test_')}" for module in modules} & files
    named = set[str]().union(*(named_in(ast.get_docstring(ast.parse(each.read_text())) or "") for each in modules))
    assert sorted(named - (files - by_name)) == [], "no such file, or it has a module of its name"
    without = {f"{room}/{name}.py" for room, names in WITHOUT.items() for name in names.split()}
    assert files - by_name - named == without, "name the file in the docstring of the module that notices its breaks"

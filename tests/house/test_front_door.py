"""`import ddp_core` gives the names that a user learns, each loaded only when it is asked for."""

from __future__ import annotations

import ast
import re
from importlib import metadata
from pathlib import Path

import pytest

import ddp_core
import samebits
from tests.support.commands import ROOT, command

SOURCE = Path(ddp_core.__file__).read_text()
API = (ROOT / "docs" / "reference" / "api.md").read_text()


def exported(module: str) -> list[str]:
    """The `__all__` of a module, which is not imported: it may need other people's packages."""
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    raise LookupError(f"{module} has no __all__")


HEAVY = {"torch", "numpy"}
OTHERS = {"sklearn", "matplotlib", "tensorboard", "torchvision", "pydantic"}


@pytest.mark.parametrize(
    ("statement", "without"),
    [
        ("import samebits", {*HEAVY, *OTHERS, "ddp_core.base", "ddp_core.config"}),
        ("import ddp_core", {*HEAVY, *OTHERS, "ddp_core.base", "ddp_core.config"}),
        ("from ddp_core import Callback, Component, Experiment, Optimizer, Run, Schedule, train", HEAVY),
        ("import ddp_core.cli, ddp_core.config.experiment, ddp_core.config.layout, ddp_core.distributed.world", HEAVY),
        pytest.param(
            "from ddp_core import ElasticSampler",
            OTHERS
            | {f"ddp_core.{room}" for room in ("config", "trainers", "experiment", "data", "distributed", "run")},
            marks=pytest.mark.full,
        ),
    ],
)
def test_an_import_loads_nothing_that_it_does_not_need(statement: str, without: set[str]) -> None:
    found = set(command(program=("-c", f"import sys; {statement}; print(*sys.modules)")).output.split())
    assert "ddp_core" in found
    assert not found & without


def test_the_project_s_name_opens_the_door_too() -> None:
    found = command(program=("-c", "from samebits import *; import samebits; print(train, samebits.Experiment)"))
    assert (found.code, found.output.count("ddp_core")) == (0, 1), found.errors
    assert set(dir(samebits)) == set(ddp_core.__all__)
    assert not hasattr(samebits, "__path__"), "a second copy of each room could be imported"
    assert metadata.entry_points(name="samebits", group="console_scripts")


def test_every_name_is_there_and_is_what_type_checkers_are_told() -> None:
    (checked,) = [node for node in ast.parse(SOURCE).body if isinstance(node, ast.If)]
    told = {
        alias.name: node.module for node in checked.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert told == ddp_core._PLACES
    assert ddp_core.__all__ == sorted([*told, "__version__"], key=lambda name: (not name[0].isupper(), name))
    assert dir(ddp_core) == sorted(ddp_core.__all__)
    for name in told:
        assert getattr(ddp_core, name).__name__ == name
    assert ddp_core.__version__ == metadata.version("samebits")


@pytest.mark.parametrize(("wrong", "meant"), [("Expriment", "Experiment"), ("Sampler", "ElasticSampler"), ("fit", "")])
def test_a_wrong_name_gets_the_nearest(wrong: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=f"did you mean {meant}" if meant else "known: Callback, "):
        getattr(ddp_core, wrong)


def test_the_page_of_the_api_has_every_public_name_under_its_heading() -> None:
    found = re.findall(r"^###+ `(\w+)`\n\n::: (ddp_core[\w.]*)\.(\w+)$", API, re.MULTILINE)
    assert len(found) == API.count("\n::: ") > 50
    assert all(heading == name for heading, _, name in found)
    places = {name: module for _, module, name in found}
    assert ddp_core._PLACES.items() <= places.items()
    for module in re.findall(r"^### From `(ddp_core[\w.]*)`$", API, re.MULTILINE):
        assert {*exported(module)} <= places.keys(), module

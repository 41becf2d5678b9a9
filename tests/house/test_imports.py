"""Which room of the code may import which, read from the sources; and that `--help` does not wait for torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from ddp_core.base.torch_names import PRIVATE_NAMES
from tests.support.commands import command

ROOT = Path(__file__).parents[2]

# The lowest floor first. A room imports from rooms on lower floors only, never from another room on its own floor.
# A room is a module or a whole package. A part of a package that is named here is a room of its own.
FLOORS = [
    ["ddp_core.base"],
    [
        *("ddp_core.reduction", "ddp_core.checkpoint", "ddp_core.sampler", "ddp_core.distributed", "ddp_core.numerics"),
        "ddp_core.config",
    ],
    [
        *("ddp_core.sharding", "ddp_core.data", "ddp_core.model", "ddp_core.adapters", "ddp_core.observe"),
        "ddp_core.remote",
    ],
    ["ddp_core.experiment"],
    ["ddp_core.trainers"],
    ["ddp_core.record"],
    ["ddp_core.run", "ddp_core.launch"],
    ["ddp_core.live"],
    ["ddp_core.cli"],
]
# All floors of ddp_lab lie above those of ddp_core.
LAB_FLOORS = [
    ["ddp_lab.options", "ddp_lab.records"],
    ["ddp_lab.claims.framework", "ddp_lab.launch_files", "ddp_lab.probe", "ddp_lab.report.values"],
    ["ddp_lab.claims.measuring", "ddp_lab.cluster", "ddp_lab.report.reading"],
    ["ddp_lab.chaos", "ddp_lab.claims", "ddp_lab.diagnose", "ddp_lab.report.charts"],
    ["ddp_lab.report"],
]
FLOOR_OF = {room: floor for floors in (FLOORS, LAB_FLOORS) for floor, rooms in enumerate(floors) for room in rooms}
# What `python -m` runs or imports first. Each belongs to a room whose floor is given above.
DOORS = {"ddp_core.__main__": "ddp_core.cli", "ddp_core": "ddp_core.cli", "ddp_lab": "ddp_lab.report"}

# Private names that only a subclass can use. launch/agent.py and live/agent.py override these methods of torch's agent,
# and count its restarts.
OVERRIDDEN = {name for name, private in PRIVATE_NAMES.items() if private.signature} | {"_remaining_restarts"}


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(*folders: str) -> dict[str, Path]:
    return {module_name(file): file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))}


CORE, LAB = sources("ddp_core"), sources("ddp_lab")
EVERYTHING = CORE | LAB | sources("experiments", "benchmarks")


@cache
def imports(file: Path, with_types: bool = False) -> frozenset[str]:
    """The full names of all modules that the file imports; those that only type checkers import `with_types` alone."""
    found: set[str] = set()
    for node in _statements(ast.parse(file.read_text()), with_types):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module_name(file).split(".")
                above = package[: len(package) - node.level + (file.name == "__init__.py")]
                base = ".".join([*above, *([base] if base else [])])
            found |= {full if (full := f"{base}.{alias.name}") in EVERYTHING else base for alias in node.names}
    return frozenset(found)


def _statements(node: ast.AST, with_types: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not with_types and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from (part for other in child.orelse for part in _statements(other, with_types))
        else:
            yield child
            yield from _statements(child, with_types)


def room_of(module: str) -> str:
    """The room of a module: the longest name of a room with which the module's name begins."""
    names = [".".join(module.split(".")[:length]) for length in range(module.count(".") + 1, 0, -1)]
    return next((DOORS.get(name, name) for name in names if name in FLOOR_OF or name in DOORS), module)


def test_every_module_is_in_a_room() -> None:
    rooms = {module: room_of(module) for module in CORE | LAB}
    assert [module for module, room in rooms.items() if room not in FLOOR_OF] == [], "give the room a floor above"
    assert FLOOR_OF.keys() - set(rooms.values()) == set(), "a room is gone; take it out of the floors above"
    assert len(FLOORS) <= 9
    assert sum(map(len, FLOORS)) <= 20


@pytest.mark.full
@pytest.mark.parametrize("house", [CORE, LAB], ids=["ddp_core", "ddp_lab"])
def test_a_room_imports_from_lower_floors_only(house: dict[str, Path]) -> None:
    found = [(module, other) for module, file in house.items() for other in imports(file, True) if other in house]
    wrong = [
        f"{module} (floor {FLOOR_OF[here] + 1}) imports {other} (floor {FLOOR_OF[there] + 1})"
        for module, other in found
        if (here := room_of(module)) != (there := room_of(other)) and FLOOR_OF[there] >= FLOOR_OF[here]
    ]
    assert wrong == []


@pytest.mark.full
def test_there_are_no_circles_of_imports() -> None:
    """Also through imports within functions, and those for type checkers alone."""
    graph = {name: (imports(file, with_types=True) & EVERYTHING.keys()) - {name} for name, file in EVERYTHING.items()}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.full
def test_the_core_knows_no_experiment_no_docker_and_no_report() -> None:
    for module, file in CORE.items():
        tops = {name.partition(".")[0] for name in imports(file)}
        others = {"ddp_lab", "experiments", "benchmarks", "tests", "docker", "matplotlib", "jinja2", "pytest"}
        assert not tops & others, module


@pytest.mark.full
@pytest.mark.parametrize("words", [["--help"], ["list"], ["train", "--help"]], ids=" ".join)
def test_help_and_list_answer_without_what_takes_long_to_load(words: list[str]) -> None:
    code = (
        "import sys\nfrom ddp_core.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print('heavy:', {'torch', 'numpy', 'sklearn', 'matplotlib', 'docker', 'yaml', 'scipy'} & set(sys.modules))"
    )
    ended = command(*words, program=("-c", code))
    assert (ended.code, ended.output.splitlines()[-1]) == (0, "heavy: set()"), ended.errors


def private_torch(file: Path) -> set[str]:
    """The private names of torch that the file uses: by import, by attribute, or by a method that it overrides."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names |= {ast.unparse(node), node.attr}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Constant):  # in getattr, or a variable of the environment
            names |= {str(node.value)} & PRIVATE_NAMES.keys()
    return {name for name in names if name in PRIVATE_NAMES or re.match(r"torch\b[\w.]*\._[a-zA-Z]", name)}


def test_private_names_of_torch_stand_in_one_place() -> None:
    listed, used = "ddp_core.base.torch_names", "ddp_core.base.torch_internals"
    assert private_torch(CORE[listed]) >= PRIVATE_NAMES.keys()
    found = {module: private_torch(file) for module, file in EVERYTHING.items() if module not in (listed, used)}
    for agent in ("ddp_core.launch.agent", "ddp_core.live.agent"):
        found[agent] -= OVERRIDDEN
    wrong = {module: names for module, names in found.items() if names}
    assert wrong == {}, "use them through ddp_core.base.torch_internals, which says why"

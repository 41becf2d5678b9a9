"""The house: who may import whom, read from the sources; and that asking for help does not wait for torch."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A module imports from its own floor and from those below it; a package stands for all its modules.
FLOORS = {
    0: ["errors", "experiment", "layout", "options", "world"],
    1: [
        *("determinism", "environment", "ending", "faults", "fingerprint", "heartbeat", "memory", "nursery", "peers"),
        *("process_group", "profiling", "reduction", "run_lock", "sampler", "stop", "usage"),
    ],
    2: [
        *("augment", "checkpoint", "data", "data_fetch", "ledger", "loader", "losses", "metrics", "models"),
        "optimizers",
        *("run_directory", "splits", "torchvision_import", "vision"),
    ],
    3: ["experiment_file", "memory_estimate", "order", "trainers"],
    4: [
        *("__main__", "cli", "compare", "doctor", "elastic", "launch", "prepare", "watchdog"),
        *("rendezvous", "run", "run_record", "verify", "worker"),
    ],
}
FLOOR_OF = {name: floor for floor, names in FLOORS.items() for name in names}


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(*folders: str) -> dict[str, Path]:
    return {module_name(file): file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))}


CORE = sources("ddp_core")
EVERYTHING = sources("ddp_core", "experiments", "benchmarks")


def imports(file: Path, only_at_import: bool = False) -> set[str]:
    """Every module that the file imports, by full name; those for type checkers alone are left out."""
    found: set[str] = set()
    for node in _statements(ast.parse(file.read_text()), only_at_import):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module_name(file).split(".")
                above = package[: len(package) - node.level + (file.name == "__init__.py")]
                base = ".".join([*above, *([base] if base else [])])
            found |= {full if (full := f"{base}.{alias.name}") in EVERYTHING else base for alias in node.names}
    return found


def _statements(node: ast.AST, only_at_import: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from (part for other in child.orelse for part in _statements(other, only_at_import))
        elif not (only_at_import and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            yield child
            yield from _statements(child, only_at_import)


def floor_of(module: str) -> int:
    return FLOOR_OF[module.split(".")[1]]


def test_every_module_has_a_floor() -> None:
    there = {name.split(".")[1] for name in CORE if name != "ddp_core"}
    assert there - FLOOR_OF.keys() == set(), "give the new module a floor in this table"
    assert FLOOR_OF.keys() - there == set(), "a module is gone; take it out of this table"


def test_imports_never_go_up() -> None:
    wrong = [
        f"{module} (floor {floor_of(module)}) imports {other} (floor {floor_of(other)})"
        for module, file in CORE.items()
        if module != "ddp_core"
        for other in imports(file)
        if other.startswith("ddp_core.") and floor_of(other) > floor_of(module)
    ]
    assert wrong == []


def test_there_are_no_cycles_at_import() -> None:
    graph = {name: imports(file, only_at_import=True) & EVERYTHING.keys() for name, file in EVERYTHING.items()}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_core_knows_no_experiment_no_docker_and_no_report() -> None:
    for module, file in CORE.items():
        tops = {name.partition(".")[0] for name in imports(file)}
        assert not tops & {"docker", "experiments", "benchmarks", "tests", "matplotlib", "jinja2", "pytest"}, module


def test_the_core_names_no_experiment() -> None:
    builders = {name for name in ("digits", "fashion_mnist") if (ROOT / "experiments" / f"{name}.py").is_file()}
    names = {file.stem for file in (ROOT / "experiments").glob("*.py")} - builders - {"__init__"}
    assert names
    for module, file in CORE.items():
        text = file.read_text()
        assert not [name for name in names if f'"{name}"' in text], module


def test_only_the_host_side_of_the_cluster_knows_docker() -> None:
    host_side = ("experiments.cluster.", "experiments.chaos.")  # starts and judges it; breaks it
    users = {name for name, file in EVERYTHING.items() if any(to.split(".")[0] == "docker" for to in imports(file))}
    assert all(name.startswith(host_side) for name in users), users


def test_experiments_know_no_hardware() -> None:
    allowed = {"ddp_core.experiment", "ddp_core.splits", "ddp_core.augment", "ddp_core.errors"}
    for file in sorted((ROOT / "experiments").glob("*.py")):
        known = {name for name in imports(file) if name.startswith("ddp_core")}
        assert known <= allowed, f"{file.name} imports {known - allowed}"


def test_reports_read_run_directories_never_live_objects() -> None:
    for module, file in sources("experiments/report").items():
        live = {name for name in imports(file) if name.startswith("ddp_core.") and floor_of(name) == 3}
        assert live == set(), module


@pytest.mark.parametrize("module", ["ddp_core.cli", "ddp_core.experiment", "ddp_core.layout", "ddp_core.world"])
def test_floor_zero_and_the_command_import_no_torch(module: str) -> None:
    assert python("-c", f"import sys, {module}; print('torch' in sys.modules)")[0] == "False\n"


@pytest.mark.parametrize("words", [["--help"], ["list"], ["train", "--help"]], ids=" ".join)
def test_help_and_list_answer_without_torch_in_half_a_second(words: list[str]) -> None:
    code = (
        "import sys\nfrom ddp_core.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print('heavy:', {'torch', 'numpy', 'sklearn'} & set(sys.modules))"
    )
    output, seconds = python("-c", code, *words)
    assert output.endswith("heavy: set()\n")
    # Processor time: a busy machine makes everything wait.
    assert seconds < 0.5


def python(*words: str) -> tuple[str, float]:
    """Standard output of a Python process, and the processor time that it took."""
    before = os.times()
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True,
    )
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    return done.stdout, seconds

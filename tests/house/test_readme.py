"""The README and the page of the command line hold: a test runs each of their commands.

In every page of the documentation, links lead somewhere.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from pathlib import Path

import pytest

from ddp_core.checkpoint import find_checkpoints
from tests.support.commands import command, running
from tests.support.processes import HANG, ask, free_port

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
TASKS = (ROOT / "docs" / "reference" / "command-line.md").read_text()
PARTS = (ROOT / "docs" / "how-to" / "use-one-part.md").read_text()


def _commands(page: str) -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", page, re.DOTALL) + re.findall(r"\n\n((?:    make .*\n)+)", page)
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip()]


COMMANDS = [*_commands(TEXT), *_commands(TASKS)]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"])
SLURM, SWARM = "tests/cluster/test_slurm.py", "tests/cluster/test_swarm.py"
QUICK = ["--set", "max_steps=12", "--device", "cpu"]

FORK = "ddp train digits --fork outputs/digits/RUN --set optimizer.lr=0.01 --set epochs=40"

SCRIPTS = {"-": "before.py", "+": "after.py"}

ELSEWHERE = {
    "make cpu-cluster": "tests/lab/cluster/test_cluster.py",
    "make test": "tests/lab/cluster/test_cluster.py",
    "ddp rehearse digits": "tests/core/cli/test_rehearse.py",
    FORK: "tests/distributed/test_forks.py",
    "make chaos": "tests/lab/chaos/test_chaos.py",
    "make claims": "tests/lab/claims/test_claims_suite.py",
    "make report": "tests/lab/report/test_command.py",
    "make verify-layouts": "tests/core/cli/test_verify_layouts.py",
    "docker compose up ddp-cpu": "tests/docker/test_readme_commands.py",
    "docker compose up ddp-4gpu": "tests/docker/test_readme_commands.py",
    "docker compose -f compose.yaml -f compose.cpu.yaml up ddp-4gpu": "tests/docker/test_readme_commands.py",
    "EXPERIMENT=linear_regression docker compose up single-cpu": "tests/docker/test_readme_commands.py",
    "docker compose run --rm test": "tests/docker/test_readme_commands.py",
    "make gpu-check": "tests/house/test_gpu_check.py",
    "make test-gpu": "tests/house/test_recorded_pages.py",
    "ddp verify-layouts digits --device cuda": "tests/gpu/test_layouts.py",
    "sbatch launch/slurm/task-per-node.sbatch digits": SLURM,
    "srun --nodes 3 --ntasks-per-node 2 ddp train digits": SLURM,
    "docker stack deploy --resolve-image never --compose-file launch/swarm/stack.yaml ddp": SWARM,
    "kubectl apply -f launch/kubernetes/job.yaml": "tests/docker/test_kubernetes_pods.py",
    "ddp data fetch fashion_mnist": "tests/core/data/test_fetch.py",
    "ddp data fetch cifar10": "tests/core/data/test_fetch.py",
}
"""Commands that need an engine, a network or minutes, and the tests that hold them."""


WALK = [command for command in _commands(TASKS) if command.startswith("ddp ") and command not in ELSEWHERE]


def test_every_command_has_a_test() -> None:
    assert WALK
    assert set(COMMANDS) == {*WALK, *ELSEWHERE}, "a command without a test, or one that no page has any more"
    assert {path for path in ELSEWHERE.values() if not (ROOT / path).exists()} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), f"{target} leads nowhere"
        assert not anchor or anchor in _anchors(there), f"{target}: {there.name} has no such heading"


def _anchors(page: Path) -> set[str]:
    """The headings of a page, in the form that links use, and the marks in its tables."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = {heading.lower() for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
    named = {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}
    return named | {*re.findall(r'<a id="([\w-]+)">', text)}


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {f"{page.parent.name}/{page.name}" for page in (ROOT / "docs").glob("*/*.md")}
    assert {page for page in pages if f"({page})" not in index} == set()


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", PARTS, re.DOTALL))
def test_python_runs_as_it_stands(block: str, tmp_path: Path) -> None:
    ask(_execute, block, tmp_path)


def test_the_difference_is_that_of_the_ported_script() -> None:
    """Each line that the README's diff takes away or adds stands in the tutorial's scripts."""
    (shown,) = re.findall(r"```diff\n(.*?)```", TEXT, re.DOTALL)
    scripts = {sign: (ROOT / "docs/tutorials/port-your-script" / name).read_text() for sign, name in SCRIPTS.items()}
    lines = [(line[0], line[1:]) for line in shown.splitlines() if line[0] in scripts]
    assert lines
    assert [line for sign, line in lines if line not in scripts[sign].splitlines()] == []


def _execute(block: str, folder: Path) -> None:
    os.chdir(folder)
    for _ in range(2):  # the second time, a script with checkpoints resumes
        exec(compile(block, "use-one-part.md", "exec"), {"__name__": "__main__"})
    assert "Checkpointer" not in block or find_checkpoints(folder / "checkpoints")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_line_from_top_to_bottom(tmp_path: Path) -> None:
    """Run each `ddp` line in turn, shortened to a few steps, in one output directory."""
    port, settings = free_port(), {"DDP_OUTPUT": str(tmp_path)}
    with contextlib.ExitStack() as stack:
        for line in WALK:
            words = shlex.split(line)[1:]
            words = [word.replace("29400", str(port)).replace("outputs/", f"{tmp_path}/") for word in words]
            if words[0] == "rendezvous":
                stack.enter_context(running(*words))
                continue
            if words[0] in ("verify", "eval", "export"):
                words[1] = str(_newest(tmp_path))
            if words[0] == "train":
                words = [re.sub(r"^kill@(\d)0", r"kill@\1", word).replace("=20", "=3") for word in words] + QUICK
            if "--nnodes" in words:
                with running(*words, env=settings) as other:
                    ended = command(*words, env=settings)
                    other.communicate(timeout=HANG)
                assert other.returncode == 0
            else:
                ended = command(*words, env=settings)
            assert ended.code == 0, f"{line}\n{ended.errors}"


def _newest(output: Path) -> Path:
    return max((output / "digits").iterdir(), key=lambda run: run.stat().st_mtime)

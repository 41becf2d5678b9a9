"""The README holds: links lead somewhere, its Python runs as it stands, and a test runs each of its commands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import free_port

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
COMMANDS = [
    line.strip()
    for block in re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL) + re.findall(r"\n\n((?:    make .*\n)+)", TEXT)
    for line in block.splitlines()
    if line.strip()
]
QUICK = ["--set", "max_steps=12", "--device", "cpu"]

ELSEWHERE = {
    "make cpu-cluster": "tests/lab/cluster/test_cluster.py",
    "make test": "tests/lab/cluster/test_cluster.py",
    "make chaos": "tests/lab/chaos/test_chaos.py",
    "make claims": "tests/lab/claims/test_claims.py",
    "make report": "tests/lab/report/test_report.py",
    "make verify-layouts": "tests/house/test_readme.py",
    "docker compose up ddp-cpu": "tests/docker/test_layouts.py",
    "docker compose up ddp-4gpu": "tests/house/test_compose.py",
    "docker compose -f compose.yaml -f compose.cpu.yaml up ddp-4gpu": "tests/docker/test_layouts.py",
    "EXPERIMENT=linear_regression docker compose up single-cpu": "tests/docker/test_layouts.py",
    "docker compose run --rm test": "tests/docker/test_layouts.py",
    "ddp data fetch fashion_mnist": "tests/core/data/test_data_fetch.py",
    "ddp data fetch cifar10": "tests/core/data/test_data_fetch.py",
}
"""Commands that need an engine, a network or minutes, and the tests that hold them."""


def _ddp(words: list[str], output: Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"DDP_OUTPUT": str(output), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ddp_core", *words]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


def test_every_command_has_a_test() -> None:
    here = [command for command in COMMANDS if command.startswith("ddp ") and command not in ELSEWHERE]
    unknown = [command for command in COMMANDS if command not in ELSEWHERE and command not in here]
    assert not unknown
    assert {path for path in ELSEWHERE.values() if not (ROOT / path).exists()} == set()
    assert len(here) == len(WALK)


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL))
def test_python_runs_as_it_stands(block: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", block],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


WALK = [command for command in COMMANDS if command.startswith("ddp ") and command not in ELSEWHERE]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_readme_from_top_to_bottom(tmp_path: Path) -> None:
    """Each `ddp` line in turn, shortened to a few steps, in one output directory."""
    port = free_port()
    server: subprocess.Popen[str] | None = None
    try:
        for command in WALK:
            words = shlex.split(command)[1:]
            words = [word.replace("29400", str(port)) for word in words]
            if words[0] == "rendezvous":
                server = subprocess.Popen([sys.executable, "-m", "ddp_core", *words], cwd=ROOT, text=True)
                continue
            if words[0] in ("verify", "ledger"):
                words[1] = str(_newest(tmp_path, with_ledger=words[0] == "ledger"))
            if words[0] == "train":
                words = [word.replace("kill@60", "kill@6").replace("=20", "=3") for word in words] + QUICK
            if "--nnodes" in words:
                other = subprocess.Popen(
                    [sys.executable, "-m", "ddp_core", *words, "--output", str(tmp_path)],
                    cwd=ROOT,
                    stdout=subprocess.DEVNULL,
                )
                done = _ddp(words, tmp_path)
                assert other.wait(60) == 0
            else:
                done = _ddp(words, tmp_path)
            assert done.returncode == 0, f"{command}\n{done.stderr}"
    finally:
        if server is not None:
            server.terminate()
            server.wait(10)


def _newest(output: Path, with_ledger: bool) -> Path:
    runs = sorted((output / "digits").iterdir(), key=lambda run: run.stat().st_mtime)
    return next(run for run in reversed(runs) if not with_ledger or (run / "ledger").exists())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_verify_layouts_prints_one_digest(tmp_path: Path) -> None:
    done = _ddp(["verify-layouts", "digits", "--set", "max_steps=310", "--output", str(tmp_path)], tmp_path, 580)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "one digest" in done.stdout

"""What the public forge reads: its workflows call targets of the Makefile alone, and actions whose code is pinned."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.commands import ROOT
from tests.support.processes import HANG

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ZIZMOR = Path(sys.executable).parent / "zizmor"
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def commands(path: Path) -> Iterator[str]:
    """Each line that a workflow runs, with each value of the job's matrix in its place."""
    for job in read(path)["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for values in itertools.product(*matrix.values()):
            for step in job["steps"]:
                text = step.get("run", "")
                for name, value in zip(matrix, values, strict=True):
                    text = text.replace(f"${{{{ matrix.{name} }}}}", str(value))
                yield from text.splitlines()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_targets_of_the_makefile_alone(path: Path) -> None:
    for line in commands(path):
        called = re.fullmatch(r"make ([a-z-]+)( [A-Z]+=\w+)*", line)
        assert called is not None, f"{line}: what a workflow does, `make` does on any machine"
        assert called[1] in TARGETS, f"{line}: the Makefile has no such target"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_their_commit_and_jobs_may_do_little(path: Path) -> None:
    used = re.findall(r"uses: (.*)", path.read_text())
    assert used
    for action in used:
        assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", action), action
    content = read(path)
    assert content["permissions"] in ({}, {"contents": "read"})
    for name, job in content["jobs"].items():
        assert "timeout-minutes" in job, name
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False, name


def test_a_release_is_tested_first_and_pushes_both_images_the_same_bytes_each_time() -> None:
    jobs = read(WORKFLOWS[0].with_name("release.yml"))["jobs"]
    assert [step["run"] for step in jobs["test"]["steps"] if "run" in step] == ["make lint", "make test-full"]
    assert [jobs[name]["needs"] for name in ("distributions", "image", "pypi")] == ["test", "test", "distributions"]
    assert {each["torch"] for each in jobs["image"]["strategy"]["matrix"]["include"]} == {"cpu", "cuda"}
    pushed = jobs["image"]["steps"][-1]["with"]
    assert "rewrite-timestamp=true" in pushed["outputs"]
    (date,) = re.findall(r"^ARG (SOURCE_DATE_EPOCH=\d+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert date in pushed["build-args"].split()


@pytest.mark.extras
@pytest.mark.skipif(not ZIZMOR.exists(), reason="needs zizmor: `make test-extras` installs it")
def test_zizmor_finds_nothing_that_could_be_turned_against_the_project() -> None:
    words = [ZIZMOR, "--offline", "--no-progress", "--format", "plain", ".github"]
    found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=HANG, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "No findings to report" in found.stdout + found.stderr

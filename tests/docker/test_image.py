"""What the image brings by itself: labels, what it prints, its health check, and numbers that are published."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import docker
import pytest

from tests.docker.conftest import ROOT, Project

pytestmark = [pytest.mark.docker, pytest.mark.timeout(200)]

DIGEST = "73d786576316"
"""Of the weights of `digits` on every layout; README has it."""


def test_the_commands_that_it_prints_work_as_they_stand_and_end_with_the_published_digest(
    image: str, tmp_path: Path
) -> None:
    shown = run(["docker", "run", "--rm", image])
    assert shown.startswith("samebits ")
    assert "IMAGE=samebits-cpu\n" in shown
    indented = re.findall(r"^    (\S.*)$", shown.replace("IMAGE=samebits-cpu", f"IMAGE={image}"), re.MULTILINE)
    first, *steps = [line for line in indented if not line.startswith("docker compose")]
    said = [run(f"{first}; {step}", tmp_path) for step in steps]
    assert len(said) == 4, "a directory, a training, a comparison, the help"
    assert DIGEST in said[-2]
    assert said[-1].startswith("Usage: ddp ")
    written = list((tmp_path / "outputs").rglob("*"))
    (record,) = [json.loads(path.read_text()) for path in written if path.name == "run.json"]
    assert record["weights_sha256"].startswith(DIGEST)
    assert record["layout"]["label"] == "ddp-1x2-cpu"
    assert {path.stat().st_uid for path in written} == {os.getuid()}


def run(command: str | list[str], folder: Path = ROOT) -> str:
    done = subprocess.run(
        command, shell=isinstance(command, str), cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("identity", ["detected", "known"])
def test_compose_prints_the_same(project: Project, image: str, identity: str) -> None:
    project.variables["DDP_IDENTITY"] = identity
    assert project.compose("run", "--rm", "help").stdout == run(["docker", "run", "--rm", image])


def test_packages_of_ones_own_come_into_the_image(project: Project, engine: docker.DockerClient) -> None:
    project.variables |= {"EXTRA_PIP": "einops", "IMAGE_TAG": "extra"}
    built = project.compose("build", "--quiet", "ddp-cpu", timeout=180)
    assert built.returncode == 0, built.stderr
    ran = project.compose("run", "--rm", "ddp-cpu", "python", "-c", "import einops, torch; print(torch.__version__)")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("2.")
    engine.images.remove("samebits-cpu:extra")

"""What the image brings by itself: labels, what it prints, its health check, and numbers that are published."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from tests.docker.conftest import ROOT, Project

pytestmark = [pytest.mark.docker, pytest.mark.timeout(200)]

DIGEST = "73d786576316"
"""Of the weights of `digits` on every layout; README has it."""
SECOND = 1_000_000_000
WITHIN = 3


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


@pytest.fixture
def trained(image: str, engine: docker.DockerClient) -> Iterator[docker.models.containers.Container]:
    """A container that trains, with the image's health check, which is impatient here."""
    check = engine.images.get(image).attrs["Config"]["Healthcheck"]
    assert check["Test"] == ["CMD", "ddp", "health"]
    impatient = {"test": [*check["Test"], "--within", str(WITHIN)], "interval": SECOND, "retries": 1}
    container = engine.containers.run(
        image,
        ["sh", "-c", "ddp train digits --set epochs=100000; exec sleep 100"],
        detach=True,
        init=True,
        network_mode="none",
        tmpfs={"/outputs": "mode=1777"},
        healthcheck=impatient,
    )
    yield container
    container.remove(force=True)


@pytest.mark.slow
def test_health_while_training_trains_hangs_and_has_ended(trained: docker.models.containers.Container) -> None:
    until_health(trained, "healthy", "rank 0 at step ")
    trained.exec_run(["python", "-c", TO_THE_TRAINING, "suspend"])
    until_health(trained, "unhealthy", "rank 0 made its last step ")
    # A run that has ended is no run that hangs, whatever else the container does.
    trained.exec_run(["python", "-c", TO_THE_TRAINING, "resume", "terminate"])
    until_health(trained, "healthy", "no rank of this host trains now")


TO_THE_TRAINING = """
import sys, psutil
for process in psutil.process_iter():
    for verb in sys.argv[1:] if "digits" in process.cmdline() else []:
        getattr(process, verb)()
"""
"""Calls the methods of psutil.Process that its arguments name, of every process of the training."""


def until_health(container: docker.models.containers.Container, status: str, said: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        container.reload()
        health = container.attrs["State"]["Health"]
        last = health["Log"][-1]["Output"] if health["Log"] else ""
        if health["Status"] == status and said in last:
            return
        assert time.monotonic() < deadline, f"{health}\n{container.logs().decode()[-2000:]}"
        time.sleep(0.2)

"""Real containers: one image for the session, a Compose project and an output directory of its own for each test."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker
import pytest

from ddp_core.base.errors import UserError
from ddp_lab.chaos.drill import parse
from ddp_lab.cluster.containers import ContainerBackend, engine_version
from tests.docker.nodes import QUIET, Nodes, Start
from tests.support.commands import ROOT, ran

UNNAMED_USER = (4321, 4322)
"""Ids that neither the host nor the image has a name for."""

if shutil.which("docker") is not None:
    os.environ.setdefault("DOCKER_CLI_HINTS", "false")


@pytest.fixture(scope="session")
def engine() -> Iterator[docker.DockerClient]:
    """A client of the Docker engine; skips the test if there is no engine."""
    try:
        engine_version()
    except UserError as error:
        pytest.skip(str(error))
    client = docker.from_env()
    yield client
    client.close()


@pytest.fixture(scope="session")
def image(engine: docker.DockerClient) -> str:
    """The image with torch for the CPU, built from the working tree."""
    ContainerBackend().build()
    return f"samebits-cpu:{os.environ.get('IMAGE_TAG', 'latest')}"


@pytest.fixture(scope="session")
def image_for_gpus(engine: docker.DockerClient) -> str:
    """The image of the GPU services, built from the working tree."""
    built = subprocess.run(["docker", "compose", "build", "--quiet", "ddp-4gpu"], cwd=ROOT, check=False)
    assert built.returncode == 0
    return f"samebits:{os.environ.get('IMAGE_TAG', 'latest')}"


@dataclass
class Project:
    """A Compose project of one test: runs its services, reads their records, and is removed after the test."""

    output: Path
    data: Path
    name: str = field(default_factory=lambda: f"ddp-test-{secrets.token_hex(4)}")
    files: tuple[str, ...] = ("compose.yaml",)
    variables: dict[str, str] = field(default_factory=dict)

    def compose(self, *arguments: str, timeout: float = 150) -> subprocess.CompletedProcess[str]:
        """Run `docker compose ARGUMENTS` on this project's files, with its variables."""
        files = [word for name in self.files for word in ("-f", name)]
        environment = os.environ | {"DDP_OUTPUT": str(self.output), "DDP_DATA": str(self.data)} | self.variables
        return ran("docker", "compose", "-p", self.name, *files, *arguments, env=environment, timeout=timeout)

    def up(self, service: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run one service until it ends; the return code is that of the service."""
        self.variables |= variables
        return self.compose("up", "--no-build", "--no-color", "--exit-code-from", service, service)

    def records(self) -> list[dict[str, Any]]:
        """The content of run.json of every run that the project made."""
        return [json.loads(path.read_text()) for path in sorted(self.output.glob("*/*/run.json"))]

    def own(self, uid: int, gid: int) -> None:
        """Hand the mounted directories to another user."""
        for directory in (self.output, self.data):
            os.chown(directory, uid, gid)

    def remove(self) -> None:
        """Remove the project's containers and networks."""
        self.compose("--profile", "*", "down", "--timeout", "1", "--remove-orphans")


@pytest.fixture
def project(image: str, tmp_path: Path) -> Iterator[Project]:
    """A project whose containers run as the owner of its output directory."""
    output, data = tmp_path / "outputs", tmp_path / "data"
    output.mkdir()
    data.mkdir()
    made = Project(output, data, variables={"DDP_IDENTITY": "detected"})
    yield made
    made.remove()


@pytest.fixture
def start(image: str, tmp_path: Path) -> Iterator[Start]:
    """A function that starts clusters; fails the test if anything of them is left behind."""
    started: list[Nodes] = []

    def one(content: dict[str, object], *options: str, **settings: Any) -> Nodes:
        started.append(Nodes(tmp_path, parse(QUIET | content), *options, **settings))
        return started[-1]

    yield one
    for nodes in started:
        nodes.cluster.stop()
        assert nodes.cluster.left_behind() == []

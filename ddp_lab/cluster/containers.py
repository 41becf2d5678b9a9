"""Nodes as containers: Compose starts and removes them, the engine's API tells how each one ended.

Compose's own exit code says nothing about a cluster (it may be 0 although a node failed), so every node is inspected.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import docker
import docker.errors

from ddp_core.base.errors import ExitCode, UserError
from ddp_lab.cluster.cluster import Spec, Write
from ddp_lab.cluster.verdict import NodeResult

ROOT = Path(__file__).resolve().parent.parent.parent
_ANSWER_SECONDS = 2
_API_SECONDS = 60


def compose_file() -> Path:
    """The file that says what each container is. Raises UserError where this is an installed package, not a clone."""
    if not (file := ROOT / "compose.yaml").is_file():
        raise UserError("containers need compose.yaml and the Dockerfile: do this in a clone of the repository")
    return file


def engine_version() -> str:
    """The version of the engine that answers. Raises UserError saying what is missing."""
    compose_file()
    if shutil.which("docker") is None:
        raise UserError("there is no docker command", ExitCode.RESOURCES)
    try:
        client = docker.from_env(timeout=_ANSWER_SECONDS)
        version = str(client.version()["Version"])
        client.close()
    except (docker.errors.DockerException, OSError):
        raise UserError("no Docker Engine answers", ExitCode.RESOURCES) from None
    plugin = subprocess.run(
        ["docker", "compose", "version", "--short"], capture_output=True, text=True, timeout=20, check=False
    )
    if plugin.returncode != 0:
        raise UserError(
            f"Docker Engine {version} answers, but the docker command has no Compose plugin", ExitCode.RESOURCES
        )
    return version


class ContainerBackend:
    """Each node is a container of the service `node`; each launch is a Compose project of its own."""

    name = "containers"

    def __init__(self, files: Sequence[str] = ("compose.yaml",)) -> None:
        self.image = f"samebits:{os.environ.get('IMAGE_TAG', 'latest')}"
        self.variables: dict[str, str] = {}
        """Further variables for compose files."""
        self._files = [word for name in files for word in ("--file", str(ROOT / name))]
        self._client = docker.from_env(timeout=_API_SECONDS)
        self._containers: dict[str, Any] = {}
        self._threads: list[threading.Thread] = []
        self._spec: Spec | None = None

    def build(self) -> None:
        """Build the image where it is not up to date; quiet unless that fails."""
        done = subprocess.run(
            ["docker", "compose", "--project-directory", str(ROOT), "build", "--quiet", "ddp-cpu"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
            raise UserError(
                f"the image cannot be built, see below; local processes need none (BACKEND=local)\n{tail}",
                ExitCode.RESOURCES,
            )

    def start(self, spec: Spec) -> None:
        """`docker compose up` as a project of this launch alone; then find the containers that it made."""
        self._spec = spec
        for directory in (spec.output, spec.data):
            _make(directory)
        service = "node" if spec.layout == "ddp" else "single-cpu"
        done = self._compose("up", "--detach", "--no-build", "--scale", f"{service}={spec.nnodes}", service)
        self._find(service)
        if done.returncode != 0:
            tail = " ".join(line for line in done.stderr.splitlines()[-3:])
            raise UserError(f"Compose could not start the cluster: {tail}", ExitCode.RESOURCES)

    def _find(self, service: str) -> None:
        labels = [f"com.docker.compose.project={self._project}", f"com.docker.compose.service={service}"]
        found = self._client.containers.list(all=True, filters={"label": labels})
        by_number = {int(container.labels["com.docker.compose.container-number"]): container for container in found}
        for number, container in sorted(by_number.items()):
            self._containers[f"node-{number}" if service == "node" else "single"] = container

    @property
    def _project(self) -> str:
        assert self._spec is not None
        return f"ddp-{self._spec.launch_id}"

    def _compose(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        spec = self._spec
        assert spec is not None
        variables = {
            "EXPERIMENT": spec.experiment,
            "NODES": str(spec.nnodes),
            "NPROC_PER_NODE": str(spec.nproc_per_node),
            "RDZV_ID": spec.launch_id,
            "DDP_OPTIONS": shlex.join(spec.options),
            "DDP_OUTPUT": str(spec.output.resolve()),
            "DDP_DATA": str(spec.data.resolve()),
        }
        place = ["--project-directory", str(ROOT), *self._files, "--project-name", self._project]
        return subprocess.run(
            ["docker", "compose", *place, *arguments],
            cwd=ROOT,
            env=os.environ | variables | self.variables,
            capture_output=True,
            text=True,
            check=False,
        )

    def nodes(self) -> list[str]:
        """node-1, node-2, … or single."""
        return list(self._containers)

    def container(self, name: str) -> Any:
        """The docker SDK's object for a node: to kill, pause or cut it off."""
        return self._containers[name]

    def follow(self, write: Write) -> None:
        """Start one thread per node that hands over its output."""
        for name, container in self._containers.items():
            thread = threading.Thread(target=copy_output, args=(name, container, write), daemon=True)
            thread.start()
            self._threads.append(thread)

    def results(self) -> dict[str, NodeResult]:
        """The nodes whose container has exited, as the engine saw it."""
        ended = {}
        for name, container in self._containers.items():
            state = self._client.api.inspect_container(container.id)["State"]
            if state["Status"] in ("exited", "dead"):
                ended[name] = NodeResult(name, int(state["ExitCode"]), bool(state["OOMKilled"]))
        if len(ended) == len(self._containers):
            # The threads may still be handing over the last lines.
            for thread in self._threads:
                thread.join(timeout=5)
        return ended

    def terminate(self) -> None:
        """SIGTERM to every node that runs."""
        for container in self._containers.values():
            try:
                container.kill(signal="SIGTERM")
            except docker.errors.APIError:
                continue

    def stop(self) -> None:
        """Remove the project: containers and network."""
        if self._spec is not None:
            self._compose("--profile", "*", "down", "--timeout", "1", "--remove-orphans")
            for thread in self._threads:
                thread.join(timeout=5)
        self._client.close()


def _make(directory: Path) -> None:
    """Make a directory as this user; the engine would make it as root."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {directory}: {error.strerror}", ExitCode.RESOURCES) from None


def copy_output(name: str, container: Any, write: Write, since: float | None = None) -> None:
    """Hand over every line that the container writes (after `since`), until it ends."""
    rest = b""
    try:
        for chunk in container.logs(stream=True, follow=True, since=since):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                write(name, line.decode(errors="replace").rstrip("\r"))
    except (docker.errors.APIError, OSError):
        return
    if rest:
        write(name, rest.decode(errors="replace"))

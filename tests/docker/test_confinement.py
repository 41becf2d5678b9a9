"""What a training container may do, and which user owns its files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import docker
import pytest

from tests.docker.conftest import UNNAMED_USER, Project

pytestmark = [pytest.mark.docker, pytest.mark.timeout(200)]

IDENTITIES = ["detected", pytest.param("known", marks=pytest.mark.slow)]
ENDLESS = "--set epochs=100000"


def own(project: Project, identity: str, uid: int, gid: int) -> None:
    project.own(uid, gid)
    project.variables |= {"DDP_IDENTITY": identity, "DDP_UID": str(uid), "DDP_GID": str(gid)}


def eventually(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.3)


@pytest.mark.parametrize("identity", IDENTITIES)
@pytest.mark.parametrize(
    "owner",
    [
        pytest.param(UNNAMED_USER, id="another"),
        pytest.param((os.getuid(), os.getgid()), id="caller", marks=pytest.mark.slow),
    ],
)
@pytest.mark.skipif(os.getuid() != 0, reason="only root can hand directories to another user")
def test_everything_written_belongs_to_the_owner_of_the_directory(
    project: Project, identity: str, owner: tuple[int, int]
) -> None:
    own(project, identity, *owner)
    done = project.up("ddp-cpu", DDP_OPTIONS="--set epochs=1")
    assert done.returncode == 0, done.stdout + done.stderr
    written = list(project.output.rglob("*"))
    assert any(path.name == "run.json" for path in written)
    assert {(path.stat().st_uid, path.stat().st_gid) for path in written} == {owner}


@pytest.mark.parametrize("identity", IDENTITIES)
@pytest.mark.skipif(os.getuid() != 0, reason="only root can hand directories to another user")
def test_running_container_is_confined_and_saves_when_stopped(
    project: Project, identity: str, engine: docker.DockerClient
) -> None:
    own(project, identity, *UNNAMED_USER)
    project.variables["DDP_OPTIONS"] = ENDLESS
    assert project.compose("up", "--no-build", "--detach", "ddp-cpu").returncode == 0
    (container,) = engine.containers.list(filters={"label": f"com.docker.compose.project={project.name}"})
    eventually(lambda: b"epoch" in container.logs())

    settings = container.attrs["HostConfig"]
    assert settings["ReadonlyRootfs"] is True
    assert settings["CapDrop"] == ["ALL"]
    assert settings["SecurityOpt"] == ["no-new-privileges:true"]
    assert settings["Privileged"] is False
    assert not any(settings["PortBindings"] or {})
    assert (settings["CapAdd"] or []) == (["SETUID", "SETGID", "SETPCAP"] if identity == "detected" else [])
    assert not any("docker.sock" in mount["Source"] for mount in container.attrs["Mounts"])
    (network,) = container.attrs["NetworkSettings"]["Networks"]
    assert engine.networks.get(network).attrs["Internal"] is True

    # Every process, init included, runs as the owner of the directory and can never gain a capability.
    uids = {line[0] for line in container.top(ps_args="-eo uid,pid,args")["Processes"]}
    assert uids <= {str(UNNAMED_USER[0]), *([] if identity == "detected" else ["0"])}
    script = "for status in /proc/[0-9]*/status; do grep -E '^(Uid|Cap|NoNewPrivs)' $status; done"
    user = f"{UNNAMED_USER[0]}:{UNNAMED_USER[1]}"
    lines = container.exec_run(["sh", "-c", script], user=user).output.decode().splitlines()
    assert lines
    assert {line.split()[1] for line in lines if line.startswith("Uid")} == {str(UNNAMED_USER[0])}
    assert {line.split()[1] for line in lines if line.startswith(("CapEff", "CapPrm", "CapInh"))} == {"0" * 16}
    assert {line.split()[1] for line in lines if line.startswith("NoNewPrivs")} == {"1"}

    for place in ("/app/new", "/opt/venv/new", "/usr/local/bin/new", "/app/experiments/new"):
        assert container.exec_run(["touch", place], user=user).exit_code != 0
    assert container.exec_run(["touch", "/tmp/new"], user=user).exit_code == 0
    assert container.exec_run(["ddp", "health", "--output", "/outputs"], user=user).exit_code == 0

    started = time.monotonic()
    container.stop(timeout=60)
    assert time.monotonic() - started < 30
    container.reload()
    assert container.attrs["State"]["ExitCode"] == 75
    (record,) = project.records()
    assert record["status"] == "stopped"


def test_image_brings_no_way_to_build_and_no_root(image: str, engine: docker.DockerClient) -> None:
    script = "id -u; command -v gcc cc pip git curl; ddp list"
    output = engine.containers.run(
        image, ["sh", "-c", script], remove=True, read_only=True, network_mode="none"
    ).decode()
    uid, *listed = output.splitlines()
    assert uid == "10001"
    assert not [line for line in listed if line.startswith("/")]
    assert any(line.startswith("digits ") for line in listed)


COMPILE = """
import torch
module = torch.compile(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()))
module(torch.randn(4, 8)).sum().backward()
print("compiled")
"""


@pytest.mark.slow
def test_the_compiler_target_lets_torch_compile_in_a_confined_container(project: Project) -> None:
    project.variables |= {"IMAGE_TARGET": "compiler", "IMAGE_TAG": "compiler"}
    built = project.compose("build", "ddp-cpu", timeout=190)
    assert built.returncode == 0, built.stderr
    done = project.compose("run", "--rm", "ddp-cpu", "python", "-c", COMPILE)
    assert (done.returncode, done.stdout.strip()) == (0, "compiled"), done.stderr


def test_missing_output_directory_is_not_made_by_root(project: Project) -> None:
    project.output.rmdir()
    assert project.up("single-cpu").returncode != 0
    assert not project.output.exists()


def test_container_outside_reaches_neither_store_nor_ranks(project: Project, engine: docker.DockerClient) -> None:
    project.variables |= {"NODES": "2", "RDZV_ID": project.name, "DDP_OPTIONS": ENDLESS, "NPROC_PER_NODE": "1"}
    assert project.compose("up", "--no-build", "--detach", "node").returncode == 0
    eventually(lambda: list(project.output.glob("*/*/heartbeats/rank-1.json")))
    label = f"com.docker.compose.project={project.name}"
    insiders = engine.containers.list(filters={"label": label})
    assert {"rendezvous", "node"} == {container.labels["com.docker.compose.service"] for container in insiders}

    found = {address for container in insiders for address in sockets(container)}
    assert len(found) >= 4, "the store, the store of rank 0, and a socket of each rank"
    (inside, *_) = insiders
    assert reached(inside.exec_run(["python", "-c", REACH, *found]).output) == found
    alone = engine.containers.run(inside.image, ["python", "-c", REACH, *found], remove=True)
    assert reached(alone) == set()


REACH = """
import socket, sys
for place in sys.argv[1:]:
    try:
        socket.create_connection(place.rsplit(":", 1), timeout=2).close()
        print(place)
    except OSError:
        pass
"""
"""Prints to which HOST:PORT of its arguments a connection could be made."""


def reached(said: bytes) -> set[str]:
    return set(said.decode().split())


def sockets(container: docker.models.containers.Container) -> set[str]:
    """HOST:PORT of every socket at which a container listens for others."""
    (network,) = container.attrs["NetworkSettings"]["Networks"].values()
    listing = "import psutil; print(*[f'{c.laddr.ip} {c.laddr.port}' for c in psutil.net_connections('tcp')"
    output = container.exec_run(["python", "-c", f"{listing} if c.status == 'LISTEN'], sep='\\n')"]).output.decode()
    places = [line.split() for line in output.splitlines()]
    own = network["IPAddress"]
    return {f"{own}:{port}" for address, port in places if address in (own, "::", "0.0.0.0")}

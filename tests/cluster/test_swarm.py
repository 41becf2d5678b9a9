"""A real Docker Swarm on this machine, three engines with addresses of their own: containers and machines may be lost.

The commands are those of the how-to page. Each training ends with the digest of the single process.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_core.base.errors import UserError
from ddp_core.record.directory import find_runs
from ddp_lab.cluster.containers import ContainerBackend, engine_version
from tests.support.commands import ROOT, ran, train, trained, wait_until

SWARM = Path(__file__).with_name("swarm-up")
PAGE = (ROOT / "docs" / "how-to" / "run-on-docker-swarm.md").read_text()
SECONDS = 120
EPOCHS = "12"
USER = (4321, 4322)
"""Ids that neither this machine nor the image has a name for."""

pytestmark = [
    pytest.mark.cluster,
    # The first test starts the swarm, and loads the image into both engines.
    pytest.mark.timeout(5 * SECONDS),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for network namespaces"),
    pytest.mark.skipif(
        not all(map(shutil.which, ("docker", "dockerd", "unshare", "ip"))),
        reason="needs docker, dockerd, unshare and ip",
    ),
]


def command_of_page(beginning: str) -> str:
    """The command of the page that begins so."""
    (found,) = re.findall(rf"^{re.escape(beginning)}.*$", PAGE, re.MULTILINE)
    return str(found)


@dataclass(frozen=True)
class Swarm:
    """Three engines, node1 to node3, of which node1 is the manager."""

    home: Path
    image: str

    def up(self, *words: str) -> None:
        """Run swarm-up. Raises AssertionError where it fails."""
        settings = os.environ | {"SWARM_UP_DIR": str(self.home)}
        done = ran(SWARM, *words, env=settings, timeout=5 * SECONDS)
        assert done.returncode == 0, done.stderr

    def sh(self, command: str, node: str = "node1", **variables: str) -> str:
        """What a shell command prints whose `docker` talks to a node. Raises AssertionError where the command fails."""
        settings = os.environ | {"DOCKER_HOST": f"unix://{self.home}/{node}.sock"} | variables
        done = ran("bash", "-c", command, env=settings, timeout=SECONDS)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def containers(self) -> list[tuple[str, str]]:
        """Machine and id of each running container of the service `node`; the manager's are the first."""
        machines = sorted(file.stem for file in self.home.glob("node*.pid"))
        listing = "docker ps --quiet --filter name=ddp_node"
        return [(node, container) for node in machines for container in self.sh(listing, node).split()]


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """A swarm that is started here, with the image of the working tree, and ended afterwards."""
    try:
        engine_version()
        backend = ContainerBackend()
        backend.build()
    except UserError as error:
        pytest.skip(str(error))
    made = Swarm(tmp_path_factory.mktemp("swarm"), backend.image)
    try:
        made.up("3", made.image)
        yield made
    finally:
        made.up("--stop")


@pytest.fixture(scope="module")
def stack_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stack file, without `encrypted` where this machine's kernel has no ESP: nothing would come through there."""
    state = "ip xfrm state add src 192.0.2.1 dst 192.0.2.2 proto esp spi 1 mode transport aead 'rfc4106(gcm(aes))'"
    tried = subprocess.run(["unshare", "--net", "sh", "-c", f"{state} 0x{'0' * 40} 64"], capture_output=True)
    original = ROOT / "launch" / "swarm" / "stack.yaml"
    if tried.returncode == 0:
        return original
    stack = yaml.safe_load(original.read_text())
    assert stack["networks"]["private"].pop("driver_opts") == {"encrypted": "true"}
    changed = tmp_path_factory.mktemp("stack") / "stack.yaml"
    changed.write_text(yaml.safe_dump(stack))
    return changed


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the single process."""
    output = tmp_path_factory.mktemp("single")
    train(output, "digits", "--set", f"epochs={EPOCHS}")
    return str(trained(output)[1]["weights_sha256"])


@dataclass(frozen=True)
class Training:
    """A deployed stack."""

    swarm: Swarm
    output: Path
    variables: Mapping[str, str]

    @property
    def record(self) -> dict[str, Any]:
        """The record of its one run, empty where it has none."""
        return next((record for _, record in find_runs(self.output)), {})

    def await_steps(self, count: int) -> None:
        """Wait until its run has trained so many steps."""

        def steps() -> int:
            return sum(file.read_text().count('"kind": "step"') for file in self.output.glob("*/*/metrics.jsonl"))

        self._await(lambda: steps() >= count, f"{count} steps")

    def await_status(self, status: str) -> dict[str, Any]:
        """Wait until its record has this status; return the record."""
        self._await(lambda: self.record.get("status") == status, f"a run that is {status}")
        return self.record

    def scale(self, count: int) -> None:
        """Change the number of containers, without waiting for them."""
        command = command_of_page("docker service scale ddp_node=0").replace("=0", f"={count} --detach")
        self.swarm.sh(command)

    def said(self) -> str:
        """What the containers have said that are there."""
        return self.swarm.sh(command_of_page("docker service logs") + " 2>&1")

    def _await(self, condition: Any, what: str) -> None:
        try:
            wait_until(condition, SECONDS, what)
        except AssertionError as error:
            state = self.swarm.sh(command_of_page("docker stack ps") + " --no-trunc")
            raise AssertionError(f"{error}\n{state}\n{self.said()}") from None


@contextmanager
def training(swarm: Swarm, stack_file: Path, output: Path, **variables: str) -> Iterator[Training]:
    """Deploy a training as the page does, and remove it."""
    data = output / "data"
    for directory in (output, data):
        directory.mkdir()
        os.chown(directory, *USER)
    settings = {
        "IMAGE": swarm.image,
        "DDP_OUTPUT": str(output),
        "DDP_DATA": str(data),
        "DDP_UID": str(USER[0]),
        "DDP_GID": str(USER[1]),
        "RDZV_ID": secrets.token_hex(4),
        "DDP_OPTIONS": f"--set epochs={EPOCHS} --timeout 10 --log-every 1",
        **variables,
    }
    deploy = command_of_page("docker stack deploy").replace("launch/swarm/stack.yaml", str(stack_file))
    swarm.sh(deploy, **settings)
    try:
        yield Training(swarm, output, settings)
    finally:
        swarm.sh(command_of_page("docker stack rm"))
        left = "docker network ls --quiet --filter name=ddp_private"
        wait_until(lambda: not swarm.sh(left), SECONDS, "the stack is removed")


def test_one_training_and_nobody_else_reaches_it(swarm: Swarm, stack_file: Path, expected: str, tmp_path: Path) -> None:
    with training(swarm, stack_file, tmp_path / "outputs") as started:
        started.await_steps(1)
        assert "ddp_node.2" in swarm.sh(command_of_page("docker stack ps"))
        node, container = swarm.containers()[0]
        ask = "python -c 'import socket; print(socket.gethostbyname(\"rendezvous\"))'"
        address = swarm.sh(f"docker exec {container} {ask}", node).strip()
        assert swarm.sh(f"docker exec {container} ddp rendezvous --check {address}:29400", node) == ""
        outside = f"docker run --rm {swarm.image} ddp rendezvous --check {address}:29400"
        assert swarm.sh(f"{outside}; echo $?", node).strip() == "6"
        record = started.await_status("completed")
    assert (record["weights_sha256"], record["layout"]["label"]) == (expected, "ddp-2x2-cpu")
    assert {(path.stat().st_uid, path.stat().st_gid) for path in started.output.rglob("*")} == {USER}


@pytest.mark.slow
def test_a_stopped_run_has_saved_and_continues(swarm: Swarm, stack_file: Path, expected: str, tmp_path: Path) -> None:
    with training(swarm, stack_file, tmp_path / "outputs", NPROC_PER_NODE="1") as started:
        started.await_steps(25)
        started.scale(0)
        assert started.await_status("stopped")["exit_code"] == 75
        started.scale(2)
        record = started.await_status("completed")
        assert "resumed at step" in started.said()
    assert record["weights_sha256"] == expected


@pytest.mark.slow
def test_a_container_comes_and_another_goes(swarm: Swarm, stack_file: Path, expected: str, tmp_path: Path) -> None:
    with training(swarm, stack_file, tmp_path / "outputs", NPROC_PER_NODE="1", NODES="1", NNODES="1:3") as started:
        started.await_steps(25)
        started.scale(2)
        wait_until(lambda: "joined after step" in started.said(), SECONDS, "the second container joins")
        started.scale(1)
        record = started.await_status("completed")
    assert (record["weights_sha256"], record["layout"]["label"]) == (expected, "ddp-1x1-cpu")


@pytest.mark.parametrize("lost", ["container", pytest.param("machine", marks=pytest.mark.slow)])
def test_a_lost_container_is_replaced_or_done_without(
    swarm: Swarm, stack_file: Path, expected: str, tmp_path: Path, lost: str
) -> None:
    with training(swarm, stack_file, tmp_path / "outputs", NPROC_PER_NODE="1") as started:
        started.await_steps(25)
        node, container = swarm.containers()[-1]
        if lost == "container":
            swarm.sh(f"docker kill {container}", node)
        else:
            assert node != "node1"
            swarm.up("--off", node)
        record = started.await_status("completed")
    assert record["weights_sha256"] == expected

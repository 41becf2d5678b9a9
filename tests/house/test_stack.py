"""launch/swarm keeps its promises; the tests read it as text, so they need no Docker engine."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from tests.support.commands import ROOT

FOLDER = ROOT / "launch" / "swarm"
STACK: dict[str, Any] = yaml.safe_load((FOLDER / "stack.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = STACK["services"]
NEEDED = {"DDP_OUTPUT": "/shared/outputs", "DDP_DATA": "/shared/data", "RDZV_ID": "fresh"}
IGNORED = {"security_opt", "shm_size", "tmpfs", "restart", "devices", "privileged", "container_name", "build"}
"""What `docker stack deploy` leaves out, some of it without a word."""


@pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES.keys())
def test_service_is_confined(service: dict[str, Any]) -> None:
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["init"] is True
    assert service["user"] == "${DDP_UID:-10001}:${DDP_GID:-10001}"
    assert service["networks"] == ["private"]
    assert service["healthcheck"] == {"disable": True}
    assert {"type": "tmpfs", "target": "/tmp"} in service["volumes"]
    assert not {"cap_add", "ports", *IGNORED} & set(service)
    assert "docker.sock" not in str(service["volumes"])


def test_the_network_is_internal_and_encrypted_and_nodes_have_room_and_time() -> None:
    options = {"driver": "overlay", "internal": True, "driver_opts": {"encrypted": "true"}}
    assert STACK["networks"] == {"private": options}
    node = SERVICES["node"]
    assert {"type": "tmpfs", "target": "/dev/shm", "tmpfs": {"size": 2**30}} in node["volumes"]
    assert (node["stop_grace_period"], node["deploy"]["restart_policy"]["condition"]) == ("60s", "on-failure")


def config(*files: str) -> subprocess.CompletedProcess[str]:
    """What docker makes of the files; skips the test where there is no docker command."""
    if shutil.which("docker") is None:
        pytest.skip("there is no docker command")
    chosen = [word for name in files for word in ("--compose-file", str(FOLDER / name))]
    command = ["docker", "stack", "config", *chosen]
    return subprocess.run(command, env=os.environ | NEEDED, capture_output=True, text=True, check=False)


def test_docker_accepts_the_stack_and_gpus_change_the_device_alone() -> None:
    plain, on_gpus = config("stack.yaml"), config("stack.yaml", "gpu.yaml")
    assert (plain.returncode, on_gpus.returncode) == (0, 0), plain.stderr + on_gpus.stderr
    before, after = (yaml.safe_load(done.stdout) for done in (plain, on_gpus))
    node = after["services"]["node"]
    assert node["environment"].pop("DEVICE") == "cuda"
    (kind,) = node["deploy"].pop("resources")["reservations"]["generic_resources"]
    assert kind == {"discrete_resource_spec": {"kind": "NVIDIA-GPU", "value": 2}}
    plainly = before["services"]["node"]
    assert (plainly["environment"].pop("DEVICE"), plainly["deploy"].pop("resources", {})) == ("cpu", {})
    for service in (node, plainly):
        service["volumes"].sort(key=lambda volume: volume["target"])  # docker sorts them anew where files are merged
    assert after == before

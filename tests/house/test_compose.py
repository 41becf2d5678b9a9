"""compose.yaml keeps its promises; the tests read it as text, so they need no Docker engine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_core.base.errors import ExitCode

ROOT = Path(__file__).parents[2]
LAYOUTS = {
    "single-gpu": ("single", "cuda", "1"),
    "dp-2gpu": ("dp", "cuda", "2"),
    "dp-4gpu": ("dp", "cuda", "4"),
    "ddp-2gpu": ("ddp", "cuda", "2"),
    "ddp-4gpu": ("ddp", "cuda", "4"),
    "single-cpu": ("single", "cpu", "1"),
    "dp-cpu": ("dp", "cpu", "${NPROC_PER_NODE:-2}"),
    "ddp-cpu": ("ddp", "cpu", "${NPROC_PER_NODE:-2}"),
}
DIFFERING = {"environment", "profiles", "deploy", "depends_on", "ulimits", "image", "build"}


IMAGE = {"cpu": "samebits-cpu:${IMAGE_TAG:-latest}", "cuda": "samebits:${IMAGE_TAG:-latest}"}


def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return content


DOCKERFILE = (ROOT / "Dockerfile").read_text()
SERVICES: dict[str, dict[str, Any]] = read("compose.yaml")["services"]
GUARD = next(iter(SERVICES["ddp-4gpu"]["depends_on"]))
each_service = pytest.mark.parametrize("service", SERVICES.values(), ids=SERVICES.keys())


def test_each_layout_is_three_values_and_shares_everything_else() -> None:
    for name, expected in LAYOUTS.items():
        values = SERVICES[name]["environment"]
        assert (values["LAYOUT"], values["DEVICE"], str(values["NPROC_PER_NODE"])) == expected
        # A key without a value hands the variable on where the shell has it, and sets nothing where it has not.
        assert values["CUDA_VISIBLE_DEVICES"] is None
    common = [{key: value for key, value in SERVICES[name].items() if key not in DIFFERING} for name in LAYOUTS]
    assert all(part == common[0] for part in common)


def test_only_what_trains_on_gpus_has_torch_for_cuda() -> None:
    guard_and_layouts = {GUARD, *(name for name, (_, device, _) in LAYOUTS.items() if device == "cuda")}
    runtime = {name: service for name, service in SERVICES.items() if service["image"].startswith("samebits")}
    assert {name for name, service in runtime.items() if service["image"] == IMAGE["cuda"]} == guard_and_layouts
    torch = {name: service["build"]["args"]["TORCH"] for name, service in runtime.items()}
    assert {name for name in torch if torch[name] == "cuda"} == guard_and_layouts | {"sbom"}
    assert set(torch.values()) == {"cpu", "cuda"}


@each_service
def test_service_is_confined(service: dict[str, Any]) -> None:
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "/tmp" in str(service["tmpfs"])
    assert not {"cap_add", "privileged", "pid", "ipc", "network_mode", "user"} & set(service)
    assert service["extends"] == {"file": "compose.user.yaml", "service": "${DDP_IDENTITY:-detected}"}


@each_service
def test_no_engine_socket_no_created_directories_and_ports_on_loopback_only(service: dict[str, Any]) -> None:
    # A service with its own entrypoint, as in `detected`, does not get the command of the image.
    assert service["command"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    for volume in service.get("volumes", []):
        assert "docker.sock" not in str(volume)
        assert volume.get("read_only") or volume["bind"]["create_host_path"] is False


def test_only_tools_reach_the_outside() -> None:
    networks = read("compose.yaml")["networks"]
    assert networks["private"] == {"internal": True}
    assert {name for name, service in SERVICES.items() if service["networks"] != ["private"]} == {
        "fetch",
        "report",
        "tensorboard",
    }
    assert "ports" not in SERVICES["rendezvous"]


def test_an_identity_has_no_capability_but_what_it_gives_up_at_once() -> None:
    known, detected = (read("compose.user.yaml")["services"][name] for name in ("known", "detected"))
    assert known.keys() == {"user", "init"}
    assert {*detected["cap_add"]} == {"SETUID", "SETGID", "SETPCAP"}
    assert detected["entrypoint"] == ["run-as-owner"]


def test_what_trains_has_room_time_and_the_health_check_of_the_image() -> None:
    for name in [*LAYOUTS, "node"]:
        service = SERVICES[name]
        found = (service["shm_size"], service["tmpfs"], service["stop_grace_period"], "healthcheck" in service)
        assert found == ("1gb", "/tmp:exec", "60s", False)
    assert re.search(r'^HEALTHCHECK .*CMD \["ddp", "health"\]$', DOCKERFILE, re.MULTILINE)


def test_nodes_get_gpus_as_the_gpu_services_do() -> None:
    node = read("compose.gpu.yaml")["services"]["node"]
    assert node.items() >= {part: SERVICES["ddp-4gpu"][part] for part in ("deploy", "ulimits")}.items()
    assert (node["image"], node["environment"]["DEVICE"]) == (IMAGE["cuda"], "cuda")


def test_plain_up_runs_one_layout_that_needs_no_gpu() -> None:
    assert [name for name, service in SERVICES.items() if "profiles" not in service] == ["ddp-cpu"]


def test_override_changes_the_device_of_every_gpu_service_and_nothing_else() -> None:
    text = (ROOT / "compose.cpu.yaml").read_text()
    override = yaml.safe_load(text.replace("!reset", ""))["services"]
    gpu_services = {name for name, (_, device, _) in LAYOUTS.items() if device == "cuda"}
    assert set(override) == gpu_services
    expected = {"environment": {"DEVICE": "cpu"}, "deploy": None, "ulimits": None, "depends_on": None}
    image = {"image": IMAGE["cpu"], "build": {"args": {"TORCH": "cpu"}}}
    assert all(service == expected | image for service in override.values())
    assert len(re.findall(r"!reset null", text)) == 3 * len(gpu_services)


def test_a_machine_without_a_gpu_is_told_the_way_out_by_the_name_of_a_service_that_ends_with_4() -> None:
    """Compose shows that name and the exit code, and of what the service prints nothing."""
    files = "-f compose.yaml -f compose.cpu.yaml"
    assert files.replace(" ", "_") in GUARD
    shell, option, script = SERVICES[GUARD]["command"]
    assert SERVICES[GUARD]["entrypoint"] == []
    directories = re.findall(r"test -d (\S+)", script)
    assert directories == ["/proc/driver/nvidia/gpus", "/sys/devices/virtual/misc/dxg"]
    for there in directories:
        here = script.replace(there, "/")
        assert subprocess.run([shell, option, here], check=False, capture_output=True).returncode == 0
    nowhere = re.sub(r"test -d \S+", "test -d /nowhere", script)
    ended = subprocess.run([shell, option, nowhere], check=False, capture_output=True, text=True)
    assert ended.returncode == ExitCode.RESOURCES
    assert ended.stderr.count("\n") == 1
    assert f"docker compose {files} up" in ended.stderr


def test_every_image_ends_unprivileged() -> None:
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)
    last = [users[-1] for stage in stages if (users := re.findall(r"^USER (\S+)", stage, re.MULTILINE))]
    assert last
    assert set(last) == {"10001"}


def test_the_page_on_gpus_names_services_files_targets_and_variables_that_are_there() -> None:
    page = (ROOT / "docs" / "how-to" / "train-on-gpus.md").read_text()
    lines = re.findall(r"```console\n(.*?)```", page, re.DOTALL)[0].splitlines()
    everything = (ROOT / "compose.yaml").read_text()
    for line in lines:
        variables, _, command = line.partition("docker compose ")
        assert {name for name in re.findall(r"([A-Z_]+)=", variables) if name not in everything} == set()
        assert {file for file in re.findall(r"-f (\S+)", command) if not (ROOT / file).exists()} == set()
        assert command.split()[-1] in SERVICES
    targets = set(re.findall(r"IMAGE_TARGET=(\S+)", page))
    assert targets == {"compiler"} <= set(re.findall(r" AS (\w+)", DOCKERFILE))


@pytest.mark.skipif(shutil.which("docker") is None, reason="there is no docker command")
@pytest.mark.parametrize("files", [("compose.yaml",), ("compose.yaml", "compose.cpu.yaml")], ids=["plain", "on-cpu"])
@pytest.mark.parametrize("identity", ["known", "detected"])
def test_compose_accepts_every_service(files: tuple[str, ...], identity: str) -> None:
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode != 0:
        pytest.skip("the docker command has no Compose plugin")
    chosen = [word for name in files for word in ("-f", name)]
    environment = {**os.environ, "DDP_IDENTITY": identity, "DDP_UID": "1234", "DDP_GID": "1235"}
    command = ["docker", "compose", *chosen, "--profile", "*", "config", "--format", "json", "--no-path-resolution"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    assert set(services) == set(SERVICES)
    assert {service["user"] for service in services.values()} == {"1234:1235" if identity == "known" else "0:0"}
    assert ("deploy" in services["ddp-4gpu"]) == (len(files) == 1)

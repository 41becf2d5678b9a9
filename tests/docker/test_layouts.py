"""Each layout in a container of its own, and the GPU services on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

import docker
import pytest

from tests.docker.conftest import Project

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]

QUICK = "--set epochs=1"
NO_GPU = not Path("/proc/driver/nvidia").exists()


@pytest.mark.slow
def test_every_cpu_layout_and_a_gpu_layout_on_cpu_train_to_the_same_weights(project: Project) -> None:
    project.files = ("compose.yaml", "compose.cpu.yaml")
    for service in ("single-cpu", "dp-cpu", "ddp-cpu", "ddp-4gpu"):
        done = project.up(service, DDP_OPTIONS=QUICK)
        assert done.returncode == 0, f"{service}: {done.stdout}{done.stderr}"
    records = project.records()
    assert sorted(record["layout"]["label"] for record in records) == [
        "ddp-1x2-cpu",
        "ddp-1x4-cpu",
        "dp-2-cpu",
        "single-cpu",
    ]
    assert {record["status"] for record in records} == {"completed"}
    assert len({record["weights_sha256"] for record in records}) == 1


def test_experiment_and_quoted_options_come_through_the_environment(project: Project) -> None:
    options = "--set 'epochs=1' --set global_batch_size=32 --set 'model.width=8'"
    done = project.up("single-cpu", EXPERIMENT="digits", DDP_OPTIONS=options)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = project.records()
    assert record["experiment"]["global_batch_size"] == 32
    assert record["experiment"]["model"]["options"]["width"] == 8


@pytest.mark.skipif(not NO_GPU, reason="this machine has an NVIDIA driver")
@pytest.mark.parametrize("identity", ["detected", "known"])
def test_gpu_service_without_gpus_says_what_is_missing_and_the_way_out(
    project: Project, image_for_gpus: str, identity: str
) -> None:
    """In what Compose itself prints, because it does not show what the other services print."""
    done = project.up("ddp-4gpu", DDP_IDENTITY=identity)
    assert done.returncode != 0
    # Compose sometimes adds a line of its own, "Gracefully stopping...".
    (line,) = [line for line in done.stderr.splitlines() if "exit 4" in line]
    assert "nvidia-gpu" in line
    assert "-f_compose.yaml_-f_compose.cpu.yaml" in line
    assert "OCI runtime" not in done.stderr
    assert "could not select device driver" not in done.stderr
    assert project.records() == []


def test_an_image_knows_the_commit_that_it_was_built_with(project: Project, engine: docker.DockerClient) -> None:
    """The whole suite runs in the image that Compose builds alone: test_readme_commands.py."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    project.variables |= {"GIT_COMMIT": commit, "GIT_DIRTY": "false", "IMAGE_TAG": "commit"}
    built = project.compose("build", "--quiet", "test", timeout=300)
    assert built.returncode == 0, built.stderr
    shown = project.compose("run", "--rm", "test", "ddp", "--version")
    assert f" (commit {commit[:12]}), torch " in shown.stdout, shown.stdout + shown.stderr
    tests = ("tests/core/cli/test_help.py", "tests/core/record/test_environment.py")
    done = project.compose("run", "--rm", "test", "pytest", *tests, "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    engine.images.remove("samebits-test:commit")

"""What an image and a service are told from outside: settings, and the commit."""

from __future__ import annotations

import docker
import pytest

from tests.docker.conftest import Project

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]


def test_experiment_and_quoted_options_come_through_the_environment(project: Project) -> None:
    options = "--set 'epochs=1' --set global_batch_size=32 --set 'model.width=8'"
    done = project.up("single-cpu", EXPERIMENT="digits", DDP_OPTIONS=options)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = project.records()
    assert record["experiment"]["global_batch_size"] == 32
    assert record["experiment"]["model"]["options"]["width"] == 8


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

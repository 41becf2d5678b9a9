"""What the image brings by itself, and what it and its services are told from outside."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import docker
import pytest

from tests.docker.conftest import Project
from tests.support.commands import ROOT, ran

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]

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
    said = [run(["sh", "-c", f"{first}; {step}"], tmp_path) for step in steps]
    assert len(said) == 4, "a directory, a training, a comparison, the help"
    assert DIGEST in said[-2]
    assert said[-1].startswith("Usage: ddp ")
    written = list((tmp_path / "outputs").rglob("*"))
    (record,) = [json.loads(path.read_text()) for path in written if path.name == "run.json"]
    assert record["weights_sha256"].startswith(DIGEST)
    assert record["layout"]["label"] == "ddp-1x2-cpu"
    assert {path.stat().st_uid for path in written} == {os.getuid()}


def run(command: list[str], folder: Path = ROOT) -> str:
    done = ran(*command, cwd=folder, timeout=120)
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
    shown = project.compose("run", "--rm", "ddp-cpu", "python", "-c", "import einops, torch; print(torch.__version__)")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("2.")
    engine.images.remove("samebits-cpu:extra")


BY_TIME = """
from pathlib import Path
compiled = [path for top in ("/app", "/opt", "/usr") for path in Path(top).rglob("*.pyc")]
print(len(compiled), [str(path) for path in compiled if path.read_bytes()[4] != 3 and "debpython" not in str(path)])
"""
"""Lists the compiled files that name the time of their source, not its hash, but for those that Debian's own tool for
Python compiles as it is installed: they name the time of its package."""
CONTENTS = "find / -xdev -type f ! -path '/etc/host*' -print0 | sort -z | xargs -0 sha256sum"


def as_root(image: str, command: str) -> str:
    return run(["docker", "run", "--rm", "--user", "0", "--entrypoint", "sh", image, "-c", command])


def test_nothing_notes_the_day_of_the_build(image: str) -> None:
    count, by_time = run(["docker", "run", "--rm", image, "python", "-c", BY_TIME]).split(maxsplit=1)
    assert int(count) > 1000
    assert by_time.strip() == "[]"
    *noted, user = as_root(image, "ls -A /var/log /var/cache; grep ^ddp: /etc/shadow").splitlines()
    assert [name for name in noted if name.endswith(".log") or name in ("apt:", "ldconfig")] == []
    assert user.startswith("ddp:!:3652:"), "1980-01-01"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_builds_hold_the_same_files(project: Project, engine: docker.DockerClient) -> None:
    """Contents alone are compared: for equal times it takes a builder that this engine may not have."""
    held = []
    for tag in ("first", "second"):
        project.variables["IMAGE_TAG"] = tag
        built = project.compose("build", "--no-cache", "--quiet", "ddp-cpu", timeout=900)
        assert built.returncode == 0, built.stderr
        held.append(set(as_root(f"samebits-cpu:{tag}", CONTENTS).splitlines()))
    for tag in ("first", "second"):
        engine.images.remove(f"samebits-cpu:{tag}")
    assert len(held[0]) > 10_000
    assert sorted(held[0] ^ held[1]) == []


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
    tests = ("tests/core/cli/test_commands.py", "tests/core/record/test_environment.py")
    done = project.compose("run", "--rm", "test", "pytest", *tests, "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    engine.images.remove("samebits-test:commit")

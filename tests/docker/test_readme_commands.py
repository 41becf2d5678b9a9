"""The container commands of the page of every task, as it has them: in a fresh clone, without the variables of make."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddp_lab.cluster.containers import ContainerBackend
from tests.support.commands import ROOT, ran

pytestmark = [pytest.mark.docker, pytest.mark.timeout(300)]

NO_GPU = not Path("/proc/driver/nvidia").exists()
ON_GPUS = "docker compose up ddp-4gpu"
WHOLE_SUITE = "docker compose run --rm test"
ON_THE_IMAGE = " pytest @tests/quick.args -p no:cacheprovider tests/core/run tests/core/record tests/core/launch"
"""Words behind WHOLE_SUITE that choose the tests of what an image may change: processes, files, installed packages."""
PAGE = (ROOT / "docs" / "reference" / "command-line.md").read_text()
COMMANDS = re.findall(r"^.*docker compose .*$", PAGE.partition("### Containers\n")[2].partition("```\n\n")[0], re.M)


@dataclass
class Clone:
    """A copy of the files that git knows or would add; what is done in it knows no more than a newcomer's shell."""

    root: Path

    def run(self, command: str, timeout: float = 200) -> subprocess.CompletedProcess[str]:
        """Run a line of shell in the clone."""
        known = {
            name: value
            for name, value in os.environ.items()
            if name in ("PATH", "HOME", "BASE_IMAGE") or name.startswith(("DOCKER_", "BUILDX_", "BUILDKIT_"))
        }
        return ran("sh", "-c", command, cwd=self.root, env=known, timeout=timeout)

    def statuses(self) -> list[str]:
        """How the runs in the clone's outputs/ ended."""
        records = self.root.glob("outputs/*/*/run.json")
        return [json.loads(record.read_text())["status"] for record in records]


@pytest.fixture(scope="module")
def clone(image: str, image_for_gpus: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    """A fresh clone with the images that Compose builds in it; afterwards `image` is again what it was."""
    # Compose names the project, and so the containers, after the directory.
    root = tmp_path_factory.mktemp("clone") / f"ddp-test-{secrets.token_hex(4)}"
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)
    made = Clone(root)
    # The page's commands build an image only where there is none, and other tests have made these.
    built = made.run("docker compose build ddp-cpu ddp-4gpu test", timeout=290)
    assert built.returncode == 0, built.stderr[-3000:]
    yield made
    made.run("docker compose --profile '*' down --timeout 1 --remove-orphans")
    ContainerBackend().build()


def test_the_readme_has_the_commands_that_are_tried_here() -> None:
    assert {ON_GPUS, WHOLE_SUITE} < set(COMMANDS)


@pytest.mark.parametrize("command", [command for command in COMMANDS if " up " in command])
def test_a_layout_trains(clone: Clone, command: str) -> None:
    before = len(clone.statuses())
    done = clone.run(command)
    if command == ON_GPUS and NO_GPU:
        assert done.returncode != 0
        assert "use_-f_compose.yaml_-f_compose.cpu.yaml" in done.stderr
        assert "exit 4" in done.stderr
        assert "OCI runtime" not in done.stderr
        assert "could not select device driver" not in done.stderr
        assert len(clone.statuses()) == before
    else:
        assert done.returncode == 0, done.stdout + done.stderr
        statuses = clone.statuses()
        assert (len(statuses), set(statuses)) == (before + 1, {"completed"}), done.stdout + done.stderr


def test_an_image_that_was_built_without_make_says_that_its_commit_is_unknown(clone: Clone) -> None:
    shown = clone.run(f"{WHOLE_SUITE} ddp --version")
    assert " (commit unknown), torch " in shown.stdout, shown.stdout + shown.stderr


@pytest.mark.timeout(900)
def test_tests_pass_in_the_image(clone: Clone) -> None:
    done = clone.run(WHOLE_SUITE + ON_THE_IMAGE, timeout=800)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout

"""The pages about Kubernetes and clouds hold: what they name is there, and their commands train on two nodes."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from tests.house.conftest import settings
from tests.house.kubernetes_files import FOLDER
from tests.house.pages import Started, blocks
from tests.support.commands import ROOT, trained
from tests.support.processes import free_port

HOW_TO = ROOT / "docs" / "how-to"
KUBERNETES = (HOW_TO / "run-on-kubernetes.md").read_text()
CLOUD = (HOW_TO / "run-on-several-machines.md").read_text().partition("\n## On a cloud\n")[2]


def test_kubectl_is_told_of_files_and_names_that_are_there() -> None:
    files = {file.name: file.read_text() for file in FOLDER.glob("*.yaml")}
    names = {document["metadata"]["name"] for text in files.values() for document in yaml.safe_load_all(text)}
    lines = [line for block in blocks(KUBERNETES) if block.kind == "bash" for line in block.lines]
    said = "\n".join(line for line in lines if line.startswith("kubectl"))
    assert set(re.findall(r"-f (\S+)", said)) <= files.keys()
    assert (
        set(re.findall(r"(?:patch job|pod/|exec|-name=|cp) ?([a-z-]+)", said)) == {"digits", "digits-reader"} <= names
    )
    assert set(re.findall(r"--selector ([^=\s]+)=", said)) <= set(re.findall(r"matchLabels: {([^:]+):", str(files)))


def test_the_files_that_the_page_speaks_of_are_there() -> None:
    assert set(re.findall(r"`([a-z-]+\.yaml)`", KUBERNETES)) == {file.name for file in FOLDER.glob("*.yaml")}


@pytest.mark.slow
@pytest.mark.parametrize("command", [block.content for block in blocks(CLOUD)[:2]], ids=["torchrun", "ddp"])
def test_commands_for_a_cloud_are_one_training_on_two_machines(command: str, tmp_path: Path) -> None:
    port = str(free_port())
    line = f"{command.rstrip()} --device cpu --set max_steps=3".replace("29500", port)
    shell = settings() | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "DDP_OUTPUT": str(tmp_path / "outputs"),
        "GLOO_SOCKET_IFNAME": "lo",
        **{"NNODES": "2", "NPROC_PER_NODE": "1", "FIRST_HOST": "localhost", "FRESH_ID": tmp_path.name},
    }
    nodes = [Started(line, ROOT, tmp_path / f"said-{rank}", shell | {"NODE_RANK": rank}) for rank in "01"]
    try:
        codes = [node.end() for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert codes == [0, 0], [node.said for node in nodes]
    assert trained(tmp_path / "outputs")[1]["layout"]["label"] == "ddp-2x1-cpu"

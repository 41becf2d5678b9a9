"""The pages about Kubernetes and clouds hold: what they name is there."""

from __future__ import annotations

import re

import yaml

from tests.house.kubernetes_files import FOLDER
from tests.house.pages import blocks
from tests.support.commands import ROOT

HOW_TO = ROOT / "docs" / "how-to"
KUBERNETES = (HOW_TO / "run-on-kubernetes.md").read_text()


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

"""Where only what `pip install samebits` brings can be imported, each command works, or names its extra in one line."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import click
import pytest
from packaging.requirements import Requirement

from ddp_core.base.extras import EXTRAS
from ddp_core.cli.commands import ddp as group
from ddp_core.config.options import Asked
from tests.core.config.test_options import VALUES
from tests.support.commands import ROOT, command, search_path

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LAB = tomllib.loads((ROOT / "packages" / "lab" / "pyproject.toml").read_text())["project"]
MINE = """\"\"\"Does it train?\"\"\"
from ddp_core import Component, Experiment
data = Component(name="linear_data", options={"size": 64})
experiment = Experiment(
    name="mine", model=Component(name="linear"), data=data, loss="mean_squared_error", global_batch_size=8,
    micro_batch=4, epochs=1)
"""

# Every Python that is started with this file on its path, workers included, finds none of these modules.
BLOCK = "import os, sys\nsys.modules.update(dict.fromkeys(os.environ['DDP_TEST_BLOCKED'].split(',')))\n"

# Calls the mains in one process, so that torch is imported once. Writes, for each, its exit code and what it has said
# into a file: processes that a main starts may print, too.
WALK = """
import contextlib, importlib, io, json
from pathlib import Path

from ddp_core.base.ending import said_by

@said_by("ddp")
def main(words):
    from ddp_core.cli.click_kinds import asked_in
    from ddp_core.cli.commands import ddp
    from ddp_core.cli.prepare import check_request, prepare
    with ddp.commands["train"].make_context("train", words) as context:
        check_request(prepare(asked_in(context), "ddp train"), only_look=True)
    return 0

for module, words in json.loads(Path("calls.json").read_text()):
    said = io.StringIO()
    words = [str(next(Path("outputs/mine").iterdir())) if word == "RUN" else word for word in words]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = importlib.import_module(module).main(words)
        except SystemExit as ended:
            code = ended.code or 0
    with open("ended.jsonl", "a") as ended:
        print(json.dumps([code, said.getvalue()]), file=ended)
"""


def needed(package: str, known: set[str]) -> set[str]:
    """All packages that are installed with this one, it itself included."""
    name = re.sub(r"[-_.]+", "-", package).lower()
    if name not in known:
        known.add(name)
        try:
            asked = [Requirement(line) for line in requires(name) or ()]
        except PackageNotFoundError:
            return known
        for each in asked:
            if each.marker is None or each.marker.evaluate({"extra": ""}):
                needed(each.name, known)
    return known


def blocked() -> str:
    """The modules of all installed packages that neither the library nor the laboratory needs, if nothing else is."""
    kept = needed("samebits", {"samebits-lab", "pip"})
    others = {
        module
        for module, packages in packages_distributions().items()
        if not kept & {re.sub(r"[-_.]+", "-", package).lower() for package in packages}
    }
    brought = {module for modules in EXTRAS.values() for module in modules}
    return ",".join(sorted((others | brought) - {"ddp_core", "ddp_lab", "ddp_experiments", "sitecustomize"}))


def walk(folder: Path, calls: list[tuple[str, list[str]]]) -> list[tuple[int, str]]:
    """Call these functions `main` without the extras, in `folder`; returns the exit code and the text of each."""
    (folder / "path").mkdir()
    (folder / "path" / "sitecustomize.py").write_text(BLOCK)
    (folder / "mine.py").write_text(MINE)
    (folder / "calls.json").write_text(json.dumps(calls))
    env = {"PYTHONPATH": search_path(str(folder / "path")), "DDP_TEST_BLOCKED": blocked(), "CUDA_VISIBLE_DEVICES": ""}
    program = ("-W", "ignore", "-c", WALK)
    ended = command(env=env, program=program, cwd=folder)
    assert ended.code == 0, ended.errors
    return [(code, said) for code, said in map(json.loads, (folder / "ended.jsonl").read_text().splitlines())]


def commands(inside: click.Group, *path: str) -> Iterator[list[str]]:
    for name, each in inside.commands.items():
        yield [*path, name]
        if isinstance(each, click.Group):
            yield from commands(each, *path, name)


DDP, CLUSTER, LOOK = "ddp_core.cli", "ddp_lab.cluster.__main__", "__main__"
ROOMS = sorted(f"ddp_lab.{door.parent.name}.__main__" for door in (ROOT / "ddp_lab").glob("*/__main__.py"))
OFFERED = [[name] for name in LAB["entry-points"]["ddp.commands"]]
HELPS = [
    *((DDP, [*words, "--help"]) for words in [[], *commands(group), *OFFERED]),
    *((room, ["--help"]) for room in ROOMS),
]
OPTIONS = [(LOOK, Asked(**{"experiment": "mine.py", name: value}).to_words()) for name, value in VALUES.items()]
WORK = [
    (DDP, ["train", "mine.py", "--device", "cpu", "--output", "outputs"]),
    (DDP, ["compare"]),
    (DDP, ["watch", "--once"]),
    (DDP, ["verify", "RUN"]),
    (DDP, ["launch-files", "slurm"]),
]
NEED = [
    *(("digits", (DDP, [word, "digits"])) for word in ("train", "rehearse")),
    ("vision", (DDP, ["data", "fetch", "cifar10"])),
    ("yaml", (DDP, ["chaos", "--backend", "local"])),
    ("yaml", (CLUSTER, ["check", "ddp-cpu"])),
    ("tensorboard", (DDP, ["train", "mine.py", "--log-to", "tensorboard"])),
    ("report", (DDP, ["report"])),
    ("cluster", (CLUSTER, ["up", "--experiment", "mine.py", "--backend", "docker"])),
]
"""Each extra with a call that asks for it; RUN is the directory of the run that was trained before."""


def test_every_extra_that_is_named_exists_and_brings_its_packages() -> None:
    lists = {name: {Requirement(line) for line in lines} for name, lines in PROJECT["optional-dependencies"].items()}
    for extra, packages in EXTRAS.items():
        assert set(packages.values()) <= {each.name for each in lists[extra]}, extra

    def brought(extra: str) -> set[str]:
        return {extra}.union(*(brought(more) for each in lists[extra] for more in each.extras))

    assert EXTRAS.keys() <= brought("all")


@pytest.mark.full
def test_each_command_works_or_names_the_extra_that_it_needs(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("epochs: 1\n")
    calls = [*HELPS, *OPTIONS, *WORK, *(call for _, call in NEED)]
    ended = dict(zip(map(str, calls), walk(tmp_path, calls), strict=True))
    for call in [*HELPS, *WORK]:
        code, said = ended[str(call)]
        assert code == 0, (call, said)
    for call in OPTIONS:  # what an option names may be missing here, or too much for this machine
        code, said = ended[str(call)]
        assert code in (0, 2, 4), (call, said)
    for extra, call in NEED:
        code, said = ended[str(call)]
        assert code == 2, (call, said)
        assert said.count("\n") == 1, (call, said)
        assert f"pip install 'samebits[{extra}]'" in said, (call, said)

"""One training started by every launcher: the same digest and directory, a clean console, nothing left behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ddp_core.numerics.limits import RULES
from tests.support.commands import Ended, command, ddp, train, trained
from tests.support.processes import free_port

TOY = ("toy_mlp", "--device", "cpu")
FILES = {"checkpoints", "source", "heartbeats", "log.txt", "metrics.jsonl", "model.safetensors", "run.json"}


class Ends(NamedTuple):
    """What the layout and the launcher must not change."""

    weights: str
    optimizer: str
    fingerprint: dict[str, Any]


def ends(record: dict[str, Any]) -> Ends:
    return Ends(record["weights_sha256"], record["optimizer_sha256"], record["fingerprint"])


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """How the training ends in one process, under portable numerics as all of these."""
    found = ends(train(tmp_path_factory.mktemp("reference"), *TOY))
    assert found.fingerprint["numerics_rules"] == RULES
    return found


def check(output: Path, reference: Ends, launcher: str, ended: Ended, clean: bool = True) -> None:
    assert ended.code == 0, ended.errors
    directory, record = trained(output)
    assert ends(record) == reference
    assert (record["status"], record["exit_code"], record["options"]["launcher"]) == ("completed", 0, launcher)
    assert {path.name for path in directory.path.iterdir() if path.name != "run.lock"} >= FILES - {"heartbeats"}
    assert f"weights sha256 {reference.weights}" in ended.output
    assert ended.output.count("epoch   1 ") == 1, "one rank speaks"
    assert (directory.path / "log.txt").read_text().count("epoch   1 ") == 1
    if clean:
        assert ended.errors == ""


# A new interpreter that imports torch and its optimizers takes 5 s of processor time before it trains. So the fast
# tests start forks of the server where they can. Where each rank must be a new interpreter, they start only one rank.
each_start = pytest.mark.parametrize(
    "start", [pytest.param(ddp, id="forked"), pytest.param(command, id="as a user", marks=pytest.mark.slow)]
)


@each_start
@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ("in-process", ()),
        ("torchrun", ("--nproc-per-node", "1")),
        ("torchrun", ("--nproc-per-node", "2")),
    ],
)
def test_a_launcher_of_ddps(
    tmp_path: Path, reference: Ends, start: Callable[..., Ended], launcher: str, words: tuple[str, ...]
) -> None:
    layout = ("--layout", "ddp") if words else ()
    check(tmp_path, reference, launcher, start("train", *TOY, *layout, *words, "--output", tmp_path))


TRAIN = ["-m", "ddp_core", "train", *TOY, "--layout", "ddp"]


TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
LAUNCH = ["-m", "torch.distributed.launch", "--nproc_per_node=2"]
WITHOUT_LIMITS = """
import os, sys
from ddp_core.numerics.limits import LIMITS
shell = {name: value for name, value in os.environ.items() if name not in LIMITS}
os.execve(sys.executable, [sys.executable, *sys.argv[1:]], shell)
"""
"""Starts Python in a user's shell, which does not have the limits of portable numerics: each rank finds them itself."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        TORCHRUN,
        ["-c", WITHOUT_LIMITS, *TORCHRUN],
        [*LAUNCH, f"--master_port={free_port()}"],
        [*LAUNCH, "--use_env", f"--master_port={free_port()}"],
    ],
    ids=["torchrun", "torchrun without limits", "launch", "launch with use_env"],
)
def test_a_launcher_outside(tmp_path: Path, reference: Ends, launcher: Sequence[str]) -> None:
    ended = command("--output", tmp_path, program=[*launcher, *TRAIN])
    check(tmp_path, reference, "external", ended, clean=False)
    assert "ddp:" not in ended.errors


WORLD = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def test_dp_inside_a_launcher_keeps_its_replicas(tmp_path: Path, reference: Ends) -> None:
    ended = ddp("train", *TOY, "--layout", "dp", "--nproc-per-node", "3", "--output", tmp_path, env=WORLD)
    check(tmp_path, reference, "in-process", ended)
    assert trained(tmp_path)[1]["layout"]["nproc_per_node"] == 3


TWO_NODES = ("--layout", "ddp", "--nnodes", "2")
NOWHERE = (*TWO_NODES, "--rdzv-endpoint", "29400", "--rdzv-id", "x", "--max-restarts", "0")
NONSENSE = ("--layout", "ddp", "--set", "nonsense=1")


@pytest.mark.parametrize(
    ("words", "env", "said"),
    [
        (("train", *TOY, "--layout", "single"), WORLD | {"WORLD_SIZE": "2"}, "--layout ddp"),
        (("train", *TOY, "--layout", "ddp", "--recovery", "live"), WORLD, "--recovery live needs ddp's own launcher"),
        (("train", *TOY, *TWO_NODES), {}, "--rdzv-endpoint"),
        (("train", *TOY, *NOWHERE), {}, "29400"),
        # The old launcher's argument is taken in both spellings and places.
        (("train", *TOY, "--local-rank=1", *NONSENSE), {}, "no such setting"),
        (("--local_rank=1", "train", *TOY, *NONSENSE), {}, "no such setting"),
    ],
)
def test_what_cannot_be_launched_is_said_in_one_line(
    tmp_path: Path, words: tuple[str, ...], env: dict[str, str], said: str
) -> None:
    ended = ddp(*words, "--output", tmp_path, env=env)
    assert ended.code in ((2, 6) if said == "29400" else (2,))
    assert said in ended.errors
    assert ended.errors.count("\n") == 1, ended.errors

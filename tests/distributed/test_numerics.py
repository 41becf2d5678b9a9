"""Portable numerics with real processes: one digest on every layout, and ranks that must agree on numerics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import command, ddp, train, trained

WORDS = ("digits", "--set", "max_steps=6", "--numerics", "portable")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The record of the run in one process."""
    return train(tmp_path_factory.mktemp("alone"), *WORDS)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [("ddp",), pytest.param(("ddp", "--launcher", "spawn"), marks=pytest.mark.slow), ("dp",)], ids=" ".join
)
def test_layouts_end_with_the_same_bits(alone: dict[str, Any], tmp_path: Path, layout: tuple[str, ...]) -> None:
    ended = ddp("train", *WORDS, "--device", "cpu", "--layout", *layout, "--output", tmp_path)
    assert ended.code == 0, ended.errors
    check(trained(tmp_path)[1], alone)


def check(record: dict[str, Any], alone: dict[str, Any]) -> None:
    assert record["weights_sha256"] == alone["weights_sha256"]
    assert record["fingerprint"] == alone["fingerprint"]
    assert record["options"]["numerics"] == "portable"


WITHOUT_LIMITS = """
import os, sys
from ddp_core.numerics.limits import LIMITS
shell = {name: value for name, value in os.environ.items() if name not in LIMITS}
os.execve(sys.executable, [sys.executable, *sys.argv[1:]], shell)
"""


@pytest.mark.slow
def test_ranks_of_a_launcher_outside_find_the_limits_by_themselves(alone: dict[str, Any], tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "-m", "ddp_core")
    words = ("train", *WORDS, "--layout", "ddp", "--device", "cpu", "--output", tmp_path)
    ended = command(*torchrun, *words, program=("-c", WITHOUT_LIMITS))
    assert ended.code == 0, ended.errors
    check(trained(tmp_path)[1], alone)

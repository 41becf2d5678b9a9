"""Portable numerics with real processes: one digest on every layout, and ranks that must agree on numerics."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ddp, train, trained, without_limits
from tests.support.processes import HANG, free_port

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


@pytest.mark.slow
def test_ranks_of_a_launcher_outside_find_the_limits_by_themselves(alone: dict[str, Any], tmp_path: Path) -> None:
    ended = _ranks(tmp_path, ["portable", "portable"])
    assert [code for code, _ in ended] == [0, 0], ended
    check(trained(tmp_path)[1], alone)


@pytest.mark.slow
def test_a_native_and_a_portable_rank_refuse_to_meet(tmp_path: Path) -> None:
    ended = _ranks(tmp_path, ["native", "portable"])
    assert [code for code, _ in ended] == [2, 2], ended
    said = "".join(errors for _, errors in ended)
    assert said.startswith("ddp: error: ranks 1 have another numerics than rank 0: ")
    assert said.count("\n") == 1
    assert not list(tmp_path.glob("*/*/run.json"))


def _ranks(output: Path, numerics: list[str]) -> list[tuple[int, str]]:
    """Exit code and errors of ranks that are started one by one, each where no limit is set."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(numerics))}
    words = ("-m", "ddp_core", "train", "--layout", "ddp", "--device", "cpu", "--output", str(output), *WORDS[:-1])
    processes = [
        subprocess.Popen(
            [sys.executable, *words, each],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=without_limits() | place | {"RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank, each in enumerate(numerics)
    ]
    try:
        errors = [process.communicate(timeout=HANG)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, said) for process, said in zip(processes, errors, strict=True)]

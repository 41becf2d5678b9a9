"""Trainings on emulated CPUs, alone and together with this machine's own CPU, end with the same weights."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from ddp_core.distributed.world import free_port
from tests.emulated.emulation import PATIENCE, emulated, needs_emulator, output_of, start
from tests.support.commands import trained
from tools.emulation import CPUS

pytestmark = pytest.mark.timeout(3 * PATIENCE)

STEPS = 4
QUICK = "EPYC-Rome-v2"
"""The emulated CPU of the one case that is no slow test: half a minute."""


def words(output: Path, *more: str) -> list[str]:
    """`ddp train` of some steps of digits under portable numerics, for an interpreter."""
    settings = ["--set", f"max_steps={STEPS}", "--device", "cpu", "--numerics", "portable"]
    return ["-m", "ddp_core", "train", "digits", *settings, "--output", str(output), *more]


def ended(output: Path) -> tuple[str, str]:
    """The digests of the weights and of the optimizer's state of the only run below `output`."""
    record = trained(output)[1]
    return record["weights_sha256"], record["optimizer_sha256"]


@cache
def here() -> tuple[str, str]:
    """How a single process on this machine's own CPU ends, with nothing set but the limits."""
    with TemporaryDirectory() as output:
        output_of(start([sys.executable, *words(Path(output))]))
        return ended(Path(output))


@needs_emulator
@pytest.mark.parametrize("cpu", [pytest.param(cpu, marks=[pytest.mark.slow] * (cpu != QUICK)) for cpu in CPUS])
def test_digits_ends_alike_on_an_emulated_cpu(cpu: str, tmp_path: Path) -> None:
    output_of(emulated(cpu, *words(tmp_path)))
    assert ended(tmp_path) == here()


@pytest.mark.slow
@needs_emulator
def test_one_rank_here_and_one_on_an_emulated_cpu_end_as_a_single_process_does(tmp_path: Path) -> None:
    port = free_port()
    more = ["--layout", "ddp", "--timeout", "300"]
    ranks = [start([sys.executable, *words(tmp_path, *more)], as_rank(0, port))]
    ranks.append(emulated("EPYC-Rome-v2", *words(tmp_path, *more), added=as_rank(1, port)))
    try:
        for rank in reversed(ranks):
            output_of(rank)
    finally:
        for rank in ranks:
            end(rank)
    assert ended(tmp_path) == here()


def as_rank(rank: int, port: int) -> dict[str, str]:
    """A launcher's variables for one of two nodes with a rank each."""
    facts: dict[str, Any] = {"RANK": rank, "GROUP_RANK": rank, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    facts |= {"WORLD_SIZE": 2, "GROUP_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in facts.items()} | {"GLOO_SOCKET_IFNAME": "lo"}


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process that still runs."""
    if process.poll() is None:
        process.kill()
        with contextlib.suppress(ValueError):
            process.communicate()

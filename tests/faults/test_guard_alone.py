"""The rehearsal without the mends: what a mend makes right, or refuses by name, it finds as well.

A mend knows one culprit: a flag, a buffer, a generator. The rehearsal knows the promise alone. So here each mend is
switched off in the process that rehearses, whose forks train, and an experiment that needs it goes wrong on some
layout; the run must be refused before it begins.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ddp_core.base.errors import ExitCode
from ddp_core.record.directory import find_runs
from tests.support import quick
from tests.support.commands import LAUNCHER_VARIABLES
from tests.support.processes import run_processes


def nothing(*_: Any, **__: Any) -> None:
    """Stands for what is switched off."""


OFF: Mapping[str, Mapping[str, Any]] = {
    "written parameters": {
        "ddp_core.reduction.watching.WrittenParameters.refuse_changes": nothing,
        "ddp_core.trainers.data_parallel.DataParallelStrategy._require_same_parameters": nothing,
    },
    "hooks of replicas": {"ddp_core.trainers.data_parallel.share_hooks": nothing},
    "keyed draws": {"ddp_core.base.seeds.key_draws": nothing, "ddp_core.data.loader.key_draws": nothing},
}
"""For each mend: what is replaced, and by what."""

DP = ("--layout", "dp", "--nproc-per-node", "3")
DDP = ("--layout", "ddp", "--nproc-per-node", "2")
STRICT = ("--guard", "strict")
TESTS = Path(__file__).parents[1]


def run(output: Path, off: str, words: tuple[str, ...], habit: str) -> tuple[int, str]:
    """Train with a mend switched off: the exit code, and what was said in the end."""
    (code,) = run_processes(_train, 1, output, off, words, habit)
    return code, (output / "said").read_text()


def _train(rank: int, world_size: int, output: Path, off: str, words: tuple[str, ...], habit: str) -> int:
    os.environ["CASE"] = habit
    for name in LAUNCHER_VARIABLES:
        del os.environ[name]
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(output / "said", os.O_WRONLY | os.O_CREAT), 2)
    with pytest.MonkeyPatch.context() as patch:
        for name, instead in OFF.get(off, {}).items():
            patch.setattr(name, instead)
        return quick.main(["train", *words, "--device", "cpu", "--rehearsal", "on", "--output", str(output)])


def file(name: str, kind: str) -> tuple[str, ...]:
    return (str(TESTS / "distributed" / "experiment_files" / f"{name}.py"), "--set", f"model.kind={kind}")


def case(off: str, *words: str, habit: str = "", fast: bool = False) -> Any:
    known = [Path(word).stem if word.endswith(".py") else word for word in words]
    name = f"{off}, {' '.join([*known, habit]).strip()}"
    return pytest.param(off, words, habit, marks=() if fast else pytest.mark.slow, id=name)


NOBODY = "what nobody foresaw"
FOREIGN = (str(TESTS / "core" / "run" / "experiment_files" / "foreign_code.py"),)


@pytest.mark.full
@pytest.mark.parametrize(
    ("off", "words", "habit"),
    [
        # A forward that writes to its weights.
        case("written parameters", *file("writing", "decay"), *DDP),
        # Hooks on weights.
        case("hooks of replicas", *file("changing", "hooks"), *DP, fast=True),
        # Random numbers.
        case("keyed draws", *file("draws", "forward"), fast=True),
        # Samples that are random, which only a strict guard refuses, and a model that asks whether it is cut.
        case(NOBODY, *FOREIGN, *STRICT, habit="noisy but where it is digested", fast=True),
        case(NOBODY, *FOREIGN, *DDP, "--shard", "parameters", habit="asks whether it is cut"),
    ],
)
def test_it_is_found_with_its_mend_switched_off(tmp_path: Path, off: str, words: tuple[str, ...], habit: str) -> None:
    code, said = run(tmp_path, off, words, habit)
    assert (code, "Traceback" in said) == (ExitCode.BAD_INPUT, False), (code, said)
    assert not any(record["status"] == "completed" for _, record in find_runs(tmp_path))

"""The tools that measure claims; and real measurements of claims whose outcome does not depend on the machine."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ddp_lab.claims.framework import suite
from ddp_lab.claims.framework.setting import Setting
from ddp_lab.claims.measuring.file_watch import watch_files
from ddp_lab.claims.measuring.memory_budget import train_within
from ddp_lab.claims.measuring.ranks import run_ranks
from ddp_lab.claims.measuring.training import run_command
from tests.support.processes import HANG
from tests.support.wording import refusing


def fails_on_rank_one(rank: int, world_size: int) -> int:
    if rank == 1:
        raise ValueError("rank one is unwell\nwith details")
    return rank


def never_ends(rank: int, world_size: int) -> None:
    time.sleep(600)


def test_a_failing_rank_is_named_in_one_line() -> None:
    with refusing() as caught:
        run_ranks(fails_on_rank_one, 2, timeout=HANG)
    assert "\n" not in str(caught.value)


def test_a_hard_time_limit() -> None:
    with refusing():
        run_ranks(never_ends, 1, timeout=1)


def measured(number: str, output: Path) -> dict[str, Any]:
    (known,) = suite.known_claims([number])
    content = suite.measure_one(known, Setting(quick=True, output=output, cores=2), {})
    assert content["measurements"] is not None, content["reason"]
    return content


@pytest.mark.parametrize(
    ("number", "verdicts"),
    [
        ("C03", ["confirmed", "confirmed", "confirmed", "refuted"]),
        ("C09", ["confirmed", "refuted"]),
        pytest.param("C08", ["confirmed"], marks=pytest.mark.slow),
        pytest.param("C10", ["confirmed", "refuted"], marks=pytest.mark.slow),
        pytest.param("C12", ["confirmed", "confirmed", "refuted"], marks=pytest.mark.slow),
        # Which way of evaluating is faster, the last two parts, depends on the load of the machine.
        pytest.param("C13", ["confirmed", "refuted", "confirmed"], marks=pytest.mark.slow),
        pytest.param("C14", ["confirmed"] * 3, marks=pytest.mark.slow),
        pytest.param("C15", ["confirmed", "refuted"], marks=pytest.mark.slow),
        pytest.param(
            "C19", ["confirmed", "confirmed", *["not measurable here"] * 2, "confirmed"], marks=pytest.mark.slow
        ),
    ],
)
def test_what_depends_on_no_machine_is_measured_as_published(number: str, verdicts: list[str], tmp_path: Path) -> None:
    content = measured(number, tmp_path)
    found = [part["verdict"] for part in content["parts"]] or [content["verdict"]]
    assert found[: len(verdicts)] == verdicts


def test_files_opened_for_writing_are_seen_by_rank(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    program = f"import os; open({str(folder / 'read')!r}); os.open({str(folder / 'new')!r}, os.O_WRONLY | os.O_CREAT)"
    (folder / "read").touch()
    with watch_files("checkpoints") as watch:
        for rank, words in (("0", program), ("1", "open('/dev/null')")):
            environment = {"PYTHONPATH": watch.search_path, "RANK": rank}
            assert run_command([sys.executable, "-c", words], HANG, environment) == (0, "")
        assert watch.opened() == {0: ["new"], 1: []}


@pytest.mark.slow
def test_c22_halves_train_within_a_limit_that_replicas_break() -> None:
    sizes = {"width": 1024, "steps": 3, "rate": 0.0005}
    assert train_within("whole", 2, 8, 80, **sizes)["out_of_memory"]
    assert train_within("halves", 2, 8, 80, **sizes)["losses"] == train_within("whole", 1, 8, None, **sizes)["losses"]

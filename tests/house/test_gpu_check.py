"""`make gpu-check` keeps what it had whenever it is cut off, goes on from there, and counts no stand-in as a GPU."""

from __future__ import annotations

from pathlib import Path

from benchmarks import gpu_lines
from benchmarks.gpu_lines import NAME
from ddp_core.base.errors import ExitCode
from tests.house.gpu_check_cases import HEAD, ITEMS
from tests.support.commands import ddp

CASES = "tests.house.gpu_check_cases"


def outcomes(folder: Path) -> dict[str, str]:
    return {line["item"]: line["outcome"] for line in gpu_lines.read(folder / NAME)}


def test_what_fails_is_recorded_and_ends_nothing(tmp_path: Path) -> None:
    ended = ddp(tmp_path, "short", module=CASES)
    assert ended.code == 0, ended.errors
    found = outcomes(tmp_path)
    assert set(found) == {item.name for item in ITEMS}
    assert {item for item, outcome in found.items() if outcome == "failed"} == {"raises", "dies", "outlasts"}
    said = {line["item"]: line.get("said") for line in gpu_lines.read(tmp_path / NAME)}
    assert said["raises"] == ["ValueError: no such thing"]
    assert said["dies"] == ["the process that runs it has died"]


def test_what_the_end_has_cut_off_is_no_result(tmp_path: Path) -> None:
    for _ in range(2):
        ended = ddp(tmp_path, "long", module=CASES)
        assert "no time for 1 of 2; the same command goes on" in ended.output
    found = [(line["item"], line["outcome"]) for line in gpu_lines.read(tmp_path / NAME)]
    assert found == [("outlasts the command", "cut off")] * 2, "it ran again"


def test_lines_are_merged_by_commit_and_place_and_never_those_of_a_stand_in(tmp_path: Path) -> None:
    real = HEAD | {"stand_in": False}
    first, second, kept = tmp_path / "first", tmp_path / "second", tmp_path / "kept"
    gpu_lines.append(first, real, {"item": "a", "outcome": "failed"})
    with first.open("a") as file:
        file.write('{"commit": "0123456789abcdef", "on": {"dev')  # killed there
    gpu_lines.append(first, real | {"commit": "another"}, {"item": "a", "outcome": "done"})
    gpu_lines.append(second, HEAD, {"item": "b", "outcome": "done"})
    gpu_lines.append(second, real, {"item": "b", "outcome": "passed"})
    assert gpu_lines.merge([first, second], kept) == 3
    assert gpu_lines.merge([second, first], kept) == 0
    found = gpu_lines.by_item(gpu_lines.read(kept), real)
    assert {item: line["outcome"] for item, line in found.items()} == {"a": "failed", "b": "passed"}
    assert gpu_lines.newest_first(gpu_lines.read(second))[0]["b"]["stand_in"] is False


def test_a_stand_in_is_kept_out_of_the_results() -> None:
    settings = {gpu_lines.STAND_IN: "1", "DDP_GIT_COMMIT": "0123"}
    ended = ddp(gpu_lines.RESULTS, "true", module=CASES, env=settings)
    assert ended.code == ExitCode.BAD_INPUT
    assert "a stand-in's results do not belong into benchmarks/results" in ended.errors

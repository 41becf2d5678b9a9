"""What a run warns of, because it means that the same bits are not promised, ends it with `--guard strict`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_core.base.errors import ExitCode
from tests.support.commands import Ended, ddp, trained
from tests.support.own_project import edit, write_project

TWO = ("--layout", "ddp", "--nproc-per-node", 2, "--max-restarts", 0)


def run(tmp_path: Path, file: object, *words: object, threads: int = 1) -> Ended:
    where = ("--device", "cpu", "--output", tmp_path / "out", "--data-dir", tmp_path / "data")
    return ddp("train", file, *where, *words, env={"OMP_NUM_THREADS": str(threads)})


def refused(ended: Ended, reason: str) -> None:
    assert ended.code == ExitCode.BAD_INPUT, ended.output + ended.errors
    assert ended.errors.count(reason) == 1, ended.errors
    assert "--guard strict refuses what is not promised" in ended.errors
    assert "Traceback" not in ended.errors


def test_items_that_differ_at_each_read_are_refused_before_there_is_a_run(tmp_path: Path) -> None:
    file = write_project(tmp_path / "project")
    ended = run(tmp_path, file, *TWO, "--set", "data.name=random_items", "--guard", "strict")
    refused(ended, "the data set gives other items at each read")
    assert list((tmp_path / "out").rglob("run.json")) == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        pytest.param("threads", "not promised, threads: here 2, there 1", marks=pytest.mark.slow),
        pytest.param("data", "not promised, other data", marks=pytest.mark.slow),
        ("code", "goes on with changed code (beside.py)"),
    ],
)
def test_a_run_that_would_go_on_as_another_one_is_refused_and_stays_as_it_was(
    tmp_path: Path, changed: str, reason: str
) -> None:
    file = write_project(tmp_path / "project")
    assert run(tmp_path, file, *TWO, "--checkpoint-every", 1, "--fault", "kill@2").code == ExitCode.PEERS_LOST
    before = trained(tmp_path / "out")[1]
    words: tuple[object, ...] = (*TWO, "--resume", "auto")
    if changed == "code":
        edit(file.parent / "beside.py", ".sum()", ".sum() * 2")
        words = (*words, "--accept-changed-code")
    if changed == "data":
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "shift").write_text("0.001")
    threads = 2 if changed == "threads" else 1
    refused(run(tmp_path, file, *words, "--guard", "strict", threads=threads), reason)
    directory, record = trained(tmp_path / "out")
    assert (record, (directory.path / "source-2").exists()) == (before, False)
    ended = run(tmp_path, file, *words, threads=threads)
    assert ended.code == ExitCode.DONE, ended.errors
    assert f"warning: {'goes on with changed code' if changed == 'code' else 'bit-identity with'}" in ended.output


def test_the_plain_reduction_has_nothing_to_be_strict_about(tmp_path: Path) -> None:
    ended = run(tmp_path, "toy_mlp", "--reduction", "plain", "--guard", "strict")
    assert ended.code == ExitCode.BAD_INPUT
    assert "--guard strict: the plain reduction promises nothing that could be checked" in ended.errors


@pytest.mark.slow
def test_without_a_guard_it_is_said_and_recorded_and_the_bits_are_the_same(tmp_path: Path) -> None:
    digests = {}
    for mode in ("off", "strict"):
        ended = run(tmp_path / mode, "toy_mlp", "--guard", mode)
        assert ended.code == ExitCode.DONE, ended.errors
        record = trained(tmp_path / mode / "out")[1]
        assert record["attempts"][-1]["guard"]["mode"] == record["options"]["guard"] == mode
        assert ("guard off: this run does not check" in ended.output) is (mode == "off")
        digests[mode] = record["weights_sha256"]
    assert digests["off"] == digests["strict"]

"""Whole runs with checkpoints that are damaged, or too large for the disk."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ddp_core.checkpoint import Checkpoint, find_checkpoints, newest_valid
from tests.core.checkpoint.parts_cases import flip_a_bit, truncate
from tests.faults.launches import DOTS, check_aftermath, undisturbed
from tests.faults.matrix import record_row
from tests.support.commands import Ended, ddp, run_workers, trained

WORDS = ["train", DOTS, "--device", "cpu", "--checkpoint-every", "4"]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run that died at step 18, with checkpoints of the steps 12 and 16."""
    output = tmp_path_factory.mktemp("interrupted")
    ended = ddp(*WORDS, "--output", output, "--fault", "raise@18")
    assert ended.code == 2
    directory, _ = trained(output)
    assert [checkpoint.step for checkpoint in find_checkpoints(directory.checkpoints)] == [16, 12]
    return output


@pytest.fixture
def output(interrupted: Path, tmp_path: Path) -> Path:
    """A copy of the interrupted run, which a test may damage."""
    return Path(shutil.copytree(interrupted, tmp_path / "outputs"))


def checkpoints(output: Path) -> list[Checkpoint]:
    return find_checkpoints(trained(output)[0].checkpoints)


def resume(output: Path) -> Ended:
    ended = ddp(*WORDS, "--output", output, "--resume", "auto")
    assert "Traceback" not in ended.errors
    return ended


@pytest.mark.full
@pytest.mark.parametrize(("row", "damage"), [(10, truncate), (11, flip_a_bit)])
def test_a_damaged_checkpoint_is_passed_over(
    output: Path, digest: str, row: int, damage: Callable[[Path], None]
) -> None:
    damage(checkpoints(output)[0].path)
    ended = resume(output)
    assert ended.code == 0
    assert "falling back to the checkpoint of step 12" in ended.output
    assert "resumed at step 12" in ended.output
    check_aftermath(output, digest)
    record_row(row, f"{damage.__name__}: resumed at the checkpoint before, same weights")


def test_no_valid_checkpoint_is_the_end(output: Path) -> None:
    for checkpoint in checkpoints(output):
        flip_a_bit(checkpoint.path)
    ended = resume(output)
    assert ended.code == 3
    assert ended.errors.startswith("ddp: error: ")
    assert ended.errors.count("\n") == 1
    record_row(10, "none valid: 3")


def _limit_files(victim: int, rank: int) -> None:
    """Let no file of the victim grow beyond 20 kB, as on a full disk."""
    if rank == victim:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shard", "victim"), [("", 0), *((shard, victim) for shard in ("optimizer", "parameters") for victim in (0, 1))]
)
def test_a_full_disk_of_one_rank_ends_the_run_and_loses_one_save(tmp_path: Path, shard: str, victim: int) -> None:
    wide = ["--set", f"model.width={600 if shard else 150}"]
    expected = undisturbed(tmp_path / "undisturbed", *wide)
    output, ranks = tmp_path / "outputs", 2 if shard else 1
    layout = ["--layout", "ddp", "--nproc-per-node", "2", "--shard", shard] if shard else []
    words = [*WORDS, *wide, "--output", str(output)]
    assert ddp(*words, *layout, "--fault", "raise@18").code == 2
    newest = checkpoints(output)[0]
    sizes = [part.bytes for part in newest.parts] if shard else [newest.bytes]
    assert min(sizes) > 20_000, "larger than all other files of the run"
    resumed = [*words, "--resume", "auto"]
    for rank, ended in enumerate(run_workers([*resumed, *layout], ranks, partial(_limit_files, victim))):
        assert ended.code == 4, f"rank {rank}: {ended.errors}"
        assert "file too large (EFBIG): needs" in ended.errors
        assert shard or "`ulimit -f` allows 20.0 kB for" in ended.errors
        assert not shard or f"rank {victim} (node 0): file too large" in ended.errors
        assert not shard or f".part-{victim + 1}-of-2.pt" in ended.errors
    directory, record = trained(output)
    assert (record["status"], record["exit_code"]) == ("failed", 4)
    assert newest_valid(directory.checkpoints) == newest
    assert ddp(*resumed).code == 0
    check_aftermath(output, expected)
    record_row(8, f"one of {ranks}: 4 on all, with what is needed; resumed from the checkpoint before, same weights")

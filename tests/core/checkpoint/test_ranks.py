"""What one rank cannot save is told to all, and nothing is committed."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.checkpoint import Checkpointer, Fence, Superseded, newest_valid, sweep
from tests.core.checkpoint.parts_cases import ThreadRanks, cut_state, in_threads, is_whole, names, save, save_in_parts


def full(point: str, rank: int, ranks: ThreadRanks) -> Callable[[str], None]:
    def at(reached: str) -> None:
        if (reached, ranks.rank) == (point, rank):
            raise OSError(errno.ENOSPC, "No space left on device")

    return at


@pytest.mark.parametrize(
    ("rank", "point", "asynchronous"),
    [
        *((1, "data opened", False), (1, "data renamed", True), (2, "data written", True)),
        *((0, "data synced", False), (0, "manifest written", True)),
    ],
)
def test_a_full_disk_of_one_rank_is_an_error_of_all_and_commits_nothing(
    tmp_path: Path, rank: int, point: str, asynchronous: bool
) -> None:
    save(tmp_path, 3, 10)
    before = names(tmp_path)
    settings = {"asynchronous": asynchronous}
    ended = in_threads(lambda ranks: save_in_parts(tmp_path, ranks, 20, at=full(point, rank, ranks), **settings), 3)
    for error in ended:
        assert isinstance(error, UserError)
        assert error.exit_code == ExitCode.RESOURCES
        assert re.match(rf"rank {rank}: no room for .*step-000000020\.part-{rank + 1}-of-3\.pt", str(error))
    assert names(tmp_path) == before
    assert is_whole(newest_valid(tmp_path))
    assert is_whole(save(tmp_path, 3, 20)[0])


def test_an_error_after_the_commit_is_told_and_the_checkpoint_stays(tmp_path: Path) -> None:
    ended = in_threads(lambda ranks: save_in_parts(tmp_path, ranks, 10, at=full("latest synced", 0, ranks)), 2)
    assert all(isinstance(error, UserError) for error in ended)
    assert is_whole(newest_valid(tmp_path))
    assert sweep(tmp_path) == []


@pytest.mark.parametrize(("rank", "said"), [(0, "TypeError: state['odd']"), (1, "ValueError: the copy broke")])
def test_what_one_rank_cannot_save_is_told_to_the_others(tmp_path: Path, rank: int, said: str) -> None:
    """Rank 0 cannot even begin; rank 1 fails in the background."""

    def fail() -> None:
        raise ValueError("the copy broke")

    def work(ranks: ThreadRanks) -> None:
        with Checkpointer(tmp_path, ranks=ranks, asynchronous=rank == 1) as checkpointer:
            state = cut_state(10, ranks.rank, ranks.count)
            if ranks.rank == rank == 0:
                state = {"odd": object()}
            elif ranks.rank == rank:
                checkpointer._snapshots.ready = fail
            checkpointer.save(state, step=10, epoch=0)

    ended = in_threads(work, 2)
    assert type(ended[rank]).__name__ == said.partition(":")[0]
    assert isinstance(ended[1 - rank], RuntimeError)
    assert str(ended[1 - rank]).startswith(f"rank {rank} could not save a checkpoint: {said}")
    assert names(tmp_path) == set()


def test_a_full_disk_is_told_also_where_the_file_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    for error in in_threads(lambda ranks: save_in_parts(tmp_path, ranks, 20, at=full("data renamed", 1, ranks)), 2):
        assert isinstance(error, UserError)
        assert re.match(r"rank 1: no room for .*step-000000020\.part-2-of-2\.pt", str(error))


def test_a_superseded_rank_commits_nothing(tmp_path: Path) -> None:
    old, before = Fence.take(tmp_path), names(tmp_path)

    def take_over(reached: str) -> None:
        if reached == "data synced":
            Fence.take(tmp_path)

    def work(ranks: ThreadRanks) -> None:
        fence = Fence(tmp_path, old.token)
        save_in_parts(tmp_path, ranks, 10, fence=fence, at=take_over if ranks.rank == 1 else lambda _: None)

    assert [type(error) for error in in_threads(work, 2)] == [Superseded, Superseded]
    assert names(tmp_path) == before


def test_a_part_that_the_first_rank_does_not_see_is_not_committed(tmp_path: Path) -> None:
    def work(ranks: ThreadRanks) -> None:
        save_in_parts(tmp_path / str(ranks.rank), ranks, 10)

    for error in in_threads(work, 2):
        assert isinstance(error, UserError)
        assert "rank 1 has written step-000000010.part-2-of-2.pt, but rank 0 does not see it" in str(error)
    assert [*names(tmp_path / "0"), *names(tmp_path / "1")] == []

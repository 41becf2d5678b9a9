"""Runs in a store: what a reader finds while one is copied, and which machine goes on. Tests bringing.py, too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddp_core.base.errors import UserError
from ddp_core.checkpoint import Checkpointer, find_checkpoints
from ddp_core.remote.bringing import bring, bring_newest
from ddp_core.remote.sending import BROUGHT, COPIED, Sender
from ddp_core.remote.store import Store
from tests.core.checkpoint.saved import is_whole, save_steps, steps_in
from tests.support.records import a_record

NAME = "mine/single-20260101T000000Z-abcdef"


class Failing(Store):
    """A store of which the call number `at` fails: `half` leaves an object cut off, as a bad client would."""

    def __init__(self, address: str, at: int, half: bool = False) -> None:
        super().__init__(address)
        self.calls, self.at, self.half = 0, at, half

    def _count(self, name: str) -> None:
        self.calls += 1
        if self.calls == self.at:
            if self.half and name.endswith(".pt"):
                super().write(name, b"cut")
            raise UserError("the store does not answer", 4)

    def write(self, name: str, content: bytes) -> None:
        self._count(name)
        super().write(name, content)

    def send(self, name: str, file: int) -> None:
        self._count(name)
        super().send(name, file)

    def remove(self, name: str) -> None:
        self._count(name)
        super().remove(name)


@pytest.fixture
def bucket(tmp_path: Path) -> str:
    (tmp_path / "bucket").mkdir()
    return f"file://{tmp_path}/bucket"


def a_run(folder: Path, *steps: int, **fields: object) -> Path:
    run = folder / NAME
    (run / "checkpoints").mkdir(parents=True)
    (run / "run.json").write_text(json.dumps(a_record(**fields)))
    (run / "metrics.jsonl").write_text("{}\n")
    save_steps(Checkpointer(run / "checkpoints", keep_last=2), *steps)
    return run


def sent(run: Path, bucket: str) -> Sender:
    sender = Sender(run, Store(f"{bucket}/{NAME}"))
    sender.send()
    return sender


def found(bucket: str, folder: Path) -> list[int]:
    """The steps of the checkpoints that a reader brings, each of them whole."""
    bring(bucket, folder)
    checkpoints = find_checkpoints(folder / NAME / "checkpoints")
    assert all(map(is_whole, checkpoints))
    return [checkpoint.step for checkpoint in checkpoints]


@pytest.mark.parametrize("half", [False, True])
def test_a_reader_finds_whole_checkpoints_or_none_wherever_the_store_fails(
    tmp_path: Path, bucket: str, half: bool
) -> None:
    at, is_over = 0, False
    while not is_over:
        at += 1
        here, address = tmp_path / f"here-{at}", f"{bucket}/{at}"
        run = a_run(here, 1, 2)
        sent(run, address).close()
        save_steps(Checkpointer(run / "checkpoints", keep_last=2), 3, 4)
        store = Failing(f"{address}/{NAME}", at, half)
        try:
            Sender(run, store).send()
        except UserError:
            steps = found(address, tmp_path / f"there-{at}")
            assert max(steps) in (2, 4)
        else:
            is_over = True
    assert at > 7
    assert found(address, tmp_path / "there") == [4, 3]


def test_another_machine_goes_on_and_the_first_one_copies_nothing_more(tmp_path: Path, bucket: str) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    run = a_run(first, 1)
    older = sent(run, bucket)
    bring_newest(bucket, second, "mine.py")
    save_steps(Checkpointer(second / NAME / "checkpoints"), 2)
    sent(second / NAME, bucket)
    save_steps(Checkpointer(run / "checkpoints"), 9)
    with pytest.raises(UserError, match="another launch"):
        older.send()
    older.close()
    assert found(bucket, tmp_path / "reader") == [2, 1]
    # A new launch on the first machine trains on with what the second has made; its own steps are put aside.
    bring_newest(bucket, first, "mine.py")
    assert steps_in(run / "checkpoints") == [2, 1]
    (aside,) = (tmp_path / "first.superseded").iterdir()
    assert steps_in(aside / "checkpoints") == [9, 1]


def test_what_a_killed_launch_has_not_copied_is_copied_by_the_next(tmp_path: Path, bucket: str) -> None:
    run = a_run(tmp_path / "here", 1)
    sent(run, bucket).close()
    save_steps(Checkpointer(run / "checkpoints"), 2)
    bring_newest(bucket, tmp_path / "here", "mine.py")
    assert steps_in(run / "checkpoints") == found(bucket, tmp_path / "there") == [2, 1]


def test_a_launch_that_copies_now_is_left_alone(tmp_path: Path, bucket: str) -> None:
    run = a_run(tmp_path / "here", 1)
    copier = sent(run, bucket)
    bring_newest(bucket, tmp_path / "here", None)
    save_steps(Checkpointer(run / "checkpoints"), 2)
    copier.send()
    assert found(bucket, tmp_path / "there") == [2, 1]


def test_a_checkpoint_that_training_removes_while_it_is_sent_arrives_whole(tmp_path: Path, bucket: str) -> None:
    run = a_run(tmp_path / "here", 1)

    class Slow(Store):
        def send(self, name: str, file: int) -> None:
            for path in (run / "checkpoints").glob("step-*") if name.endswith(".pt") else ():
                path.unlink()
            super().send(name, file)

    Sender(run, Slow(f"{bucket}/{NAME}")).send()
    assert found(bucket, tmp_path / "there") == [1]


def test_what_vanishes_here_as_a_whole_is_not_removed_there(tmp_path: Path, bucket: str) -> None:
    run = a_run(tmp_path / "here", 1, 2)
    sender = sent(run, bucket)
    for path in [*(run / "checkpoints").iterdir(), run / "run.json"]:
        path.unlink()
    sender.send()
    assert found(bucket, tmp_path / "there") == [2, 1]


def test_the_newest_unfinished_run_of_the_experiments_file_is_brought(tmp_path: Path, bucket: str) -> None:
    for number, fields in enumerate(
        [
            {"started_at": "2026-01-01"},
            {"started_at": "2026-01-02"},
            {"started_at": "2026-01-03", "status": "completed"},
            {"started_at": "2026-01-04", "experiment_file": "other.py"},
        ]
    ):
        run = a_run(tmp_path / str(number), 1, **fields)
        Sender(run, Store(f"{bucket}/mine/run-{number}")).send()
    bring_newest(bucket, tmp_path / "here", "mine.py")
    assert [path.name for path in tmp_path.glob("here/mine/*")] == ["run-1"]


def test_names_that_lead_out_of_the_folder_are_refused(tmp_path: Path, bucket: str) -> None:
    run = a_run(tmp_path / "here", 1)
    sent(run, bucket)

    class Bad(Store):
        def names(self, below: str = "") -> dict[str, str]:
            return {"run.json": "", "../../evil": ""}

    from ddp_core.remote.bringing import bring_run

    with pytest.raises(UserError, match="lead out"):
        bring_run(Bad(f"{bucket}/{NAME}"), tmp_path / "there", True)


def test_nothing_of_this_machine_is_copied(tmp_path: Path, bucket: str) -> None:
    run = a_run(tmp_path / "here", 1)
    (run / "run.lock").write_text("host")
    (run / "checkpoints" / ".step-000000002.pt.0123456789ab.tmp").write_text("partly")
    sent(run, bucket)
    names = {Path(name).name for name in Store(bucket).names()}
    assert names == {"run.json", "metrics.jsonl", "latest.json", "step-000000001.json", "step-000000001.pt", "writer"}
    assert (run / COPIED).exists()
    assert not (run / BROUGHT).exists()

"""Runs in a store: what a reader finds while one is copied, and which machine goes on.

Tests remote/bringing.py and remote/store.py, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest

from ddp_core.base.errors import UserError
from ddp_core.checkpoint import Checkpointer, find_checkpoints
from ddp_core.record.lock import RunLock
from ddp_core.remote import cache
from ddp_core.remote.bringing import bring, prepare
from ddp_core.remote.sending import Sender, Superseded
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

    def read(self, name: str) -> bytes | None:
        self._count("")
        return super().read(name)

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
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "bucket").mkdir()
    return f"file://{tmp_path}/bucket"


def a_run(folder: Path, *steps: int, name: str = NAME, **fields: object) -> Path:
    run = folder / name
    (run / "checkpoints").mkdir(parents=True)
    (run / "run.json").write_text(json.dumps(a_record(**fields)))
    (run / "metrics.jsonl").write_text("{}\n")
    save(run, *steps)
    return run


def save(run: Path, *steps: int) -> None:
    """Train on: checkpoints of which two stay, and a record."""
    save_steps(Checkpointer(run / "checkpoints", keep_last=2), *steps)
    os.utime(run / "run.json")


def send(run: Path, bucket: str) -> None:
    with Sender(run, Store(f"{bucket}/{NAME}")) as sender:
        sender.send()


def found(bucket: str, folder: Path) -> list[int]:
    """The steps of the checkpoints that a reader brings, each of them whole."""
    bring(f"{bucket}/{NAME}", folder, records_only=False)
    checkpoints = find_checkpoints(folder / "checkpoints")
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
        send(run, address)
        save(run, 3, 4)
        try:
            with Sender(run, Failing(f"{address}/{NAME}", at, half)) as sender:
                sender.send()
            is_over = True
        except UserError:
            assert max(found(address, tmp_path / f"there-{at}")) in (2, 4)
        prepare(address, here, "mine.py")
        assert steps_in(run / "checkpoints") == [4, 3] == found(address, tmp_path / f"after-{at}")[:2]
    assert at > 12


def test_another_machine_goes_on_and_the_first_one_copies_nothing_more(tmp_path: Path, bucket: str) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    run = a_run(first, 1)
    with Sender(run, Store(f"{bucket}/{NAME}")) as older:
        older.send()
        prepare(bucket, second, "mine.py")
        save(second / NAME, 2)
        send(second / NAME, bucket)
        save(run, 9)
        with pytest.raises(Superseded):
            older.send()
    assert found(bucket, tmp_path / "reader") == [2, 1]
    # A new launch on the first machine trains on with what the second has made; its own steps are put aside.
    prepare(bucket, first, "mine.py")
    assert steps_in(run / "checkpoints") == [2, 1]
    (aside,) = (cache() / "superseded").iterdir()
    assert steps_in(aside / "checkpoints") == [9, 1]


def test_a_take_over_while_a_slow_store_takes_the_data_commits_nothing(tmp_path: Path, bucket: str) -> None:
    run = a_run(tmp_path / "first", 1)

    class Slow(Store):
        def send(self, name: str, file: int) -> None:
            super().send(name, file)
            if name.endswith("2.pt"):
                Store(self.address).write("writer", b"another")

    send(run, bucket)
    save(run, 2)
    with pytest.raises(Superseded), Sender(run, Slow(f"{bucket}/{NAME}")) as sender:
        sender.send()
    assert found(bucket, tmp_path / "reader") == [1]


def test_what_was_brought_and_trained_while_the_store_was_away_is_kept(tmp_path: Path, bucket: str) -> None:
    send(a_run(tmp_path / "first", 1), bucket)
    prepare(bucket, tmp_path / "second", "mine.py")
    run = tmp_path / "second" / NAME
    save(run, 2)
    with pytest.raises(UserError):
        Sender(run, Failing(f"{bucket}/{NAME}", 1))
    prepare(bucket, tmp_path / "second", "mine.py")
    assert steps_in(run / "checkpoints") == [2, 1] == found(bucket, tmp_path / "reader")


def test_a_copy_of_a_run_that_went_on_elsewhere_is_brought_anew(tmp_path: Path, bucket: str) -> None:
    run = a_run(tmp_path / "first", 1)
    with Sender(run, Store(f"{bucket}/{NAME}")) as live:
        live.send()
        prepare(bucket, tmp_path / "second", "mine.py")
        save(run, 2, 3)
        live.send()
    with pytest.raises(Superseded):
        Sender(tmp_path / "second" / NAME, Store(f"{bucket}/{NAME}"))
    prepare(bucket, tmp_path / "second", "mine.py")
    assert steps_in(tmp_path / "second" / NAME / "checkpoints") == [3, 2]


def test_a_damaged_checkpoint_in_the_store_keeps_no_copy_from_going_on(tmp_path: Path, bucket: str) -> None:
    send(a_run(tmp_path / "first", 1, 2), bucket)
    Store(f"{bucket}/{NAME}").remove("checkpoints/step-000000001.pt")
    prepare(bucket, tmp_path / "second", "mine.py")
    run = tmp_path / "second" / NAME
    assert steps_in(run / "checkpoints") == [2]
    save(run, 3)
    send(run, bucket)
    assert found(bucket, tmp_path / "reader") == [3, 2]


def test_what_cannot_be_brought_begins_nothing_anew(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(a_run(tmp_path / "first", 1), bucket)

    def fails(self: Store, name: str, target: Path) -> None:
        raise UserError("the connection was lost", 4)

    monkeypatch.setattr(Store, "fetch", fails)
    with pytest.raises(UserError, match="lost"):
        prepare(bucket, tmp_path / "second", "mine.py")


def test_a_reader_passes_over_what_is_replaced_while_it_reads(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(tmp_path / "first", 1, 2)
    send(run, bucket)
    fetch = Store.fetch

    def slow(self: Store, name: str, target: Path) -> None:
        if name.endswith("1.pt"):
            self.remove(name)
        fetch(self, name, target)

    monkeypatch.setattr(Store, "fetch", slow)
    assert found(bucket, tmp_path / "reader") == [2]


def test_a_run_in_which_a_process_trains_is_neither_copied_nor_moved(tmp_path: Path, bucket: str) -> None:
    run = a_run(tmp_path / "here", 1)
    send(run, bucket)
    with RunLock(run):
        save(run, 2)
        Store(f"{bucket}/{NAME}").write("writer", b"another")
        prepare(bucket, tmp_path / "here", "mine.py")
        assert steps_in(run / "checkpoints") == [2, 1]


def test_a_machine_that_has_nothing_to_copy_leaves_the_writer_alone(tmp_path: Path, bucket: str) -> None:
    run = a_run(tmp_path / "first", 1)
    with Sender(run, Store(f"{bucket}/{NAME}")) as live:
        live.send()
        for wanted in ("mine.py", "other.py", ""):
            prepare(bucket, tmp_path / "second", wanted)
        damaged = tmp_path / "second" / NAME / "checkpoints" / "step-000000003.json"
        damaged.write_text("{}")
        prepare(bucket, tmp_path / "second", "")
        save(run, 2)
        live.send()
    assert found(bucket, tmp_path / "reader") == [2, 1]


def test_a_run_that_another_machine_has_ended_is_put_aside_before_it_is_gone_on_with(
    tmp_path: Path, bucket: str
) -> None:
    run = a_run(tmp_path / "first", 1)
    send(run, bucket)
    Store(f"{bucket}/{NAME}").write("writer", b"another")
    prepare(bucket, tmp_path / "first", "")
    assert not run.exists()


def test_a_run_whose_bringing_was_killed_is_no_run(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(a_run(tmp_path / "first", 1), bucket)
    fetch, calls = Store.fetch, iter(range(99))

    def killed(self: Store, name: str, target: Path) -> None:
        if next(calls) == 3:
            raise KeyboardInterrupt
        fetch(self, name, target)

    monkeypatch.setattr(Store, "fetch", killed)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    with pytest.raises(KeyboardInterrupt):
        prepare(bucket, tmp_path / "second", "mine.py")
    assert not (tmp_path / "second").exists()


def test_one_run_that_cannot_be_copied_now_keeps_no_training_from_its_store(
    tmp_path: Path, bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path / "here", 1)
    with Sender(run, Store(f"{bucket}/{NAME}")):
        prepare(bucket, tmp_path / "here", "")
    assert "still copies" in capsys.readouterr().err


def test_a_step_that_is_saved_again_replaces_its_checkpoint_only_once_it_is_there(tmp_path: Path, bucket: str) -> None:
    run = a_run(tmp_path / "here", 1)
    send(run, bucket)
    save(run, 1)  # to a second data file
    for at in (*range(1, 10), *range(1, 10)):
        with contextlib.suppress(UserError), Sender(run, Failing(f"{bucket}/{NAME}", at)) as sender:
            sender.send()
        assert found(bucket, tmp_path / f"reader-{at}") == [1]
    send(run, bucket)
    names = {Path(name).name for name in Store(f"{bucket}/{NAME}").names() if name.endswith(".pt")}
    assert names == {"step-000000001-2.pt"}


def test_a_checkpoint_that_training_removes_while_it_is_sent_arrives_whole(tmp_path: Path, bucket: str) -> None:
    run = a_run(tmp_path / "here", 1)

    class Slow(Store):
        def send(self, name: str, file: int) -> None:
            for path in (run / "checkpoints").glob("step-*") if name.endswith(".pt") else ():
                path.unlink()
            super().send(name, file)

    with Sender(run, Slow(f"{bucket}/{NAME}")) as sender:
        sender.send()
    assert found(bucket, tmp_path / "there") == [1]


def test_what_vanishes_here_is_not_removed_there(tmp_path: Path, bucket: str) -> None:
    run = a_run(tmp_path / "here", 1, 2)
    send(run, bucket)
    for path in (run / "checkpoints").iterdir():
        path.unlink()
    send(run, bucket)
    assert found(bucket, tmp_path / "there") == [2, 1]


def test_a_run_that_somebody_removed_there_does_not_come_back_by_itself(tmp_path: Path, bucket: str) -> None:
    run = a_run(tmp_path / "here", 1)
    send(run, bucket)
    store = Store(bucket)
    for name in store.names():
        store.remove(name)
    save(run, 2)
    prepare(bucket, tmp_path / "here", "mine.py")
    prepare(bucket, tmp_path / "here", "")
    assert not {name for name in store.names() if "mine" in name}
    send(run, bucket)  # a training that goes on with it
    assert found(bucket, tmp_path / "there") == [2, 1]


def test_all_runs_of_the_file_that_may_go_on_are_brought(tmp_path: Path, bucket: str) -> None:
    for number, fields in enumerate(
        [
            {},
            {"started_at": "2026-01-02T00:00:00Z", "status": "completed"},
            {"started_at": "2026-01-03T00:00:00Z", "status": "completed"},
            {"experiment_file": "other.py"},
            {},
        ]
    ):
        name = f"mine/run-{number}"
        with Sender(a_run(tmp_path, 1, name=name, **fields), Store(f"{bucket}/{name}")) as sender:
            sender.send()
    prepare(bucket, tmp_path / "here", "mine.py")
    assert sorted(path.name for path in (tmp_path / "here" / "mine").iterdir()) == ["run-0", "run-2", "run-4"]
    prepare(bucket, tmp_path / "there", "mine/run-1")
    assert [path.name for path in (tmp_path / "there" / "mine").iterdir()] == ["run-1"]
    bring(bucket, tmp_path / "records", records_only=True)
    assert len(list((tmp_path / "records" / "mine").iterdir())) == 5


@pytest.mark.parametrize("name", ["../../evil", "/evil", "a\0b"])
def test_names_that_lead_out_of_the_folder_are_refused(
    tmp_path: Path, bucket: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(a_run(tmp_path / "here", 1), bucket)
    monkeypatch.setattr(Store, "names", lambda self: {"run.json", name})
    with pytest.raises(UserError, match="lead out"):
        bring(f"{bucket}/{NAME}", tmp_path / "there", records_only=False)


def test_what_is_of_this_machine_alone_is_neither_copied_nor_brought(tmp_path: Path, bucket: str) -> None:
    run = a_run(tmp_path / "here", 1)
    (run / "run.lock").write_text("host")
    (run / "checkpoints" / ".step-000000002.pt.0123456789ab.tmp").write_text("partly")
    (run / "source" / "checkpoints").mkdir(parents=True)
    (run / "source" / "checkpoints" / "run.json").write_text("a user's file")
    send(run, bucket)
    store = Store(f"{bucket}/{NAME}")
    checkpoint = {f"checkpoints/{name}" for name in ("latest.json", "step-000000001.json", "step-000000001.pt")}
    copied = {"run.json", "metrics.jsonl", "writer", "source/checkpoints/run.json", *checkpoint}
    assert store.names() == copied
    store.write("stored.json", b"planted")
    bring(store.address, tmp_path / "there", records_only=False)
    assert not (tmp_path / "there" / "stored.json").exists()

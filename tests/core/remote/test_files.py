"""Which files of a run are committed, in which sequence they are copied, and whose attempts are newer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddp_core.base.documents import BadDocument
from ddp_core.record.lock import RunLock
from ddp_core.remote.files import Copies, committed, data_of, is_ahead, is_worked_in
from tests.support.stores import a_run


def test_what_is_committed_is_copied_after_all_that_it_speaks_of(tmp_path: Path) -> None:
    run = a_run(tmp_path, 1, 2)
    (run / "source").mkdir()
    (run / "source" / "mine.py").touch()
    (run / "checkpoints" / "step-000000003.pt").touch()  # no manifest names it
    (run / ".run.json.0123456789ab.tmp").touch()
    (run / "heartbeats").mkdir()
    for name in ("run.lock", "fence.json", "heartbeats/rank-0.json"):
        (run / name).touch()
    assert list(committed(run)) == [
        "checkpoints/step-000000001.pt",
        "checkpoints/step-000000002.pt",
        "metrics.jsonl",
        "source/mine.py",
        "checkpoints/step-000000001.json",
        "checkpoints/step-000000002.json",
        "checkpoints/latest.json",
        "run.json",
    ]


def test_a_link_is_not_copied(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    (run / "secret").symlink_to("/etc/passwd")
    (run / "folder").symlink_to("/etc")
    assert list(committed(run)) == ["metrics.jsonl", "run.json"]


def test_a_manifest_names_its_parts() -> None:
    parts = [{"file": f"step-000000001.part-{part}-of-2.pt", "bytes": part, "sha256": ""} for part in (1, 2)]
    whole = {**parts[0], "bytes": 3}
    assert [part["bytes"] for part in data_of(json.dumps(whole | {"parts": parts}).encode()).values()] == [1, 2]
    assert list(data_of(json.dumps(whole).encode())) == ["checkpoints/step-000000001.part-1-of-2.pt"]
    with pytest.raises(BadDocument):
        data_of(json.dumps(whole | {"file": "../run.json"}).encode())


def record(*attempts: str) -> bytes:
    return json.dumps({"attempts": [{"started_at": at} for at in attempts]}).encode()


def test_a_record_is_ahead_where_it_knows_each_attempt() -> None:
    assert is_ahead(record("1", "2"), record("1", "2"))
    assert is_ahead(record("1", "2"), record("1"))
    assert not is_ahead(record("1"), record("1", "2"))
    assert not is_ahead(record("1", "2"), record("1", "3"))


def test_it_is_known_what_was_copied_where(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    with Copies.of(run, "s3://here") as copies:
        copies.note("run.json")
        copies.note("gone")
    assert Copies(run, "s3://here").files.keys() == {"run.json"}
    assert Copies(run, "s3://elsewhere").files == {}


def test_a_run_that_a_process_works_in_is_known(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    assert not is_worked_in(run)
    with RunLock(run):
        assert is_worked_in(run)
    assert not is_worked_in(run)

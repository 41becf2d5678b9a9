"""What is brought from a store: what is committed there, checked; and what a run that is trained here keeps."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.checkpoint import find_checkpoints, verify
from ddp_core.record.lock import RunLock
from ddp_core.remote.address import Address
from ddp_core.remote.bringing import bring
from ddp_core.remote.copying import Copier
from tests.support.stores import a_run, save, write_record

RUNS = Address.of("memory://bucket/runs")
RUN = RUNS / "digits/single-cpu-1"
PATH = "/bucket/runs/digits/single-cpu-1"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryFileSystem]:
    """A store with a run that has checkpoints of the steps 1 and 2."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("DDP_OUTPUT", str(tmp_path / "outputs"))
    MemoryFileSystem.store.clear()
    a_run(tmp_path / "there", 1, 2)
    _copy(tmp_path / "there")
    yield MemoryFileSystem()
    MemoryFileSystem.store.clear()


def _copy(folder: Path) -> None:
    assert Copier(folder, RUNS, 0.0).follow(lambda seconds: True) == ExitCode.DONE


def steps(run: Path) -> list[int]:
    found = find_checkpoints(run / "checkpoints")
    for checkpoint in found:
        verify(checkpoint)
    return [checkpoint.step for checkpoint in found]


def test_a_run_is_brought_whole_and_then_no_data_again(store: MemoryFileSystem, tmp_path: Path) -> None:
    (store.store[f"{PATH}/checkpoints/step-000000003.pt"]) = store.store[f"{PATH}/checkpoints/step-000000002.pt"]
    here = bring(RUN, writes=False)
    assert here == tmp_path / "cache" / "samebits" / "memory" / "bucket" / "runs" / "digits" / "single-cpu-1"
    assert steps(here) == [2, 1]
    assert not (here / "checkpoints" / "step-000000003.pt").exists()
    before = (here / "checkpoints" / "step-000000002.pt").stat().st_ino
    bring(RUN, writes=False)
    assert (here / "checkpoints" / "step-000000002.pt").stat().st_ino == before


def test_a_copy_becomes_what_the_store_has(store: MemoryFileSystem, tmp_path: Path) -> None:
    here = bring(RUN, writes=False)
    save(tmp_path / "there" / "digits" / "single-cpu-1", 3)
    _copy(tmp_path / "there")
    bring(RUN, writes=False)
    assert steps(here) == [3, 2]


def test_all_runs_below_an_address_are_brought_perhaps_their_records_alone(store: MemoryFileSystem) -> None:
    here = bring(RUNS, writes=False, records_only=True) / "digits" / "single-cpu-1"
    assert steps(here) == []
    assert (here / "run.json").exists()
    bring(RUNS, writes=False)
    assert steps(here) == [2, 1]


def test_a_checkpoint_and_a_bundle_are_files(store: MemoryFileSystem) -> None:
    assert bring(RUN / "checkpoints/step-000000001.json", writes=False).name == "step-000000001.json"
    store.pipe_file("/bucket/runs/it.zip", b"bundle")
    assert bring(RUNS / "it.zip", writes=False).read_bytes() == b"bundle"


def test_a_run_that_the_store_has_no_more_leaves_the_copy(store: MemoryFileSystem) -> None:
    here = bring(RUNS, writes=False)
    for name in [name for name in store.store if name.startswith(PATH)]:
        store.store[name.replace("digits", "other")] = store.store.pop(name)
    bring(RUNS, writes=False)
    assert [file.parent.parent.name for file in here.glob("*/*/run.json")] == ["other"]


def test_a_checkpoint_with_another_digest_is_left_out(
    store: MemoryFileSystem, capfd: pytest.CaptureFixture[str]
) -> None:
    name = f"{PATH}/checkpoints/step-000000001.pt"
    store.pipe_file(name, bytes(reversed(store.cat_file(name))))
    assert steps(bring(RUN, writes=False)) == [2]
    assert "this checkpoint is left out" in capfd.readouterr().err


def test_an_address_without_a_run_and_a_name_that_leads_away_are_refused(store: MemoryFileSystem) -> None:
    with pytest.raises(UserError, match="no run is there"):
        bring(RUNS / "nothing", writes=False)
    store.store[f"{PATH}/../../stranger"] = store.store[f"{PATH}/run.json"]
    with pytest.raises(UserError, match="nothing is brought from there"):
        bring(RUN, writes=False)


def test_a_fresh_machine_gets_what_it_continues(store: MemoryFileSystem) -> None:
    here = bring(RUN, writes=True)
    assert here == RUN.written
    assert steps(here) == [2, 1]


def test_what_is_ahead_here_stays_and_gets_what_it_lacks(store: MemoryFileSystem) -> None:
    here = bring(RUN, writes=True)
    save(here, 3, keep_last=3)
    write_record(here, "noon", "evening")
    for kind in ("json", "pt"):
        (here / "checkpoints" / f"step-000000001.{kind}").unlink()
    bring(RUN, writes=True)
    assert steps(here) == [3, 2, 1]
    assert "evening" in (here / "run.json").read_text()


def test_a_run_continued_elsewhere_is_brought_anew_and_nothing_here_is_lost(
    store: MemoryFileSystem, tmp_path: Path
) -> None:
    here = bring(RUN, writes=True)
    save(here, 9, keep_last=3)
    write_record(tmp_path / "there" / "digits" / "single-cpu-1", "noon", "evening")
    _copy(tmp_path / "there")
    with RunLock(here):
        bring(RUN, writes=True)
        assert steps(here) == [9, 2, 1]
    bring(RUN, writes=True)
    assert steps(here) == [2, 1]
    (aside,) = RUN.superseded.parent.iterdir()
    assert steps(aside) == [9, 2, 1]
    shutil.rmtree(aside)

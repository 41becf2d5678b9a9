"""What a reader of the store sees while a run is copied there: whole checkpoints or none, and of one machine's run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.remote.address import Address
from ddp_core.remote.copying import Copier
from ddp_core.remote.files import Copies
from tests.support.stores import a_run, save, write_record

ADDRESS = Address.of("memory://bucket/runs")
RUN = "/bucket/runs/digits/single-cpu-1"


@pytest.fixture
def store() -> Iterator[MemoryFileSystem]:
    MemoryFileSystem.store.clear()
    yield MemoryFileSystem()
    MemoryFileSystem.store.clear()


def copier(folder: Path) -> Copier:
    return Copier(folder, ADDRESS, patience=0.0)


def copy(folder: Path) -> int:
    return copier(folder).follow(lambda seconds: True)


def names(store: MemoryFileSystem) -> set[str]:
    return {name.removeprefix(f"{RUN}/") for name in store.store}


def test_all_that_is_committed_arrives_as_it_is(store: MemoryFileSystem, tmp_path: Path) -> None:
    run = a_run(tmp_path, 1, 2)
    assert copy(tmp_path) == ExitCode.DONE
    there = {name: store.cat_file(f"{RUN}/{name}") for name in names(store)}
    assert there == {name: (run / name).read_bytes() for name in there}
    assert {"run.json", "checkpoints/step-000000002.pt", "checkpoints/latest.json"} <= there.keys()


def test_what_is_removed_here_is_removed_there(store: MemoryFileSystem, tmp_path: Path) -> None:
    run = a_run(tmp_path, 1, 2)
    copy(tmp_path)
    save(run, 3)
    copy(tmp_path)
    steps = {name for name in names(store) if "step-" in name}
    assert steps == {f"checkpoints/step-00000000{step}.{kind}" for step in (2, 3) for kind in ("json", "pt")}
    assert names(store) == Copies(run, f"{ADDRESS.text}/digits/single-cpu-1").files.keys()


class Breaking(MemoryFileSystem):
    """A store that cannot be reached after so many `good` changes."""

    cachable = False

    def __init__(self, good: int) -> None:
        super().__init__()
        self._good = good

    def _change(self) -> None:
        self._good -= 1
        if self._good < 0:
            raise OSError("the store has gone")

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **more: object) -> None:
        self._change()
        super().pipe_file(path, value, mode, **more)

    def rm_file(self, path: str) -> None:
        self._change()
        super().rm_file(path)


def whole_or_none(store: MemoryFileSystem) -> bool:
    """Whether each manifest in the store has its data."""
    there = names(store)
    return all(name.replace(".json", ".pt") in there for name in there if "step-" in name and name.endswith(".json"))


def follow(folder: Path, store: MemoryFileSystem) -> int:
    it = copier(folder)
    it._store = store
    return it.follow(lambda seconds: True)


@pytest.mark.parametrize("broken", range(12))
def test_wherever_it_breaks_off_checkpoints_are_whole_or_not_there(
    broken: int, store: MemoryFileSystem, tmp_path: Path
) -> None:
    run, breaking = a_run(tmp_path, 1, 2), Breaking(broken)
    if broken >= 7:  # so many files are copied first
        follow(tmp_path, breaking)
        assert whole_or_none(store)
        save(run, 3)
    with pytest.raises(UserError, match="the store has gone"):
        follow(tmp_path, breaking)
    assert whole_or_none(store)
    assert follow(tmp_path, store) == ExitCode.DONE
    assert whole_or_none(store)
    assert {name for name in names(store) if "step-" in name} == {
        f"checkpoints/{path.name}" for path in run.glob("*/step-*")
    }


def test_a_manifest_waits_for_a_file_that_another_one_copies(store: MemoryFileSystem, tmp_path: Path) -> None:
    run = a_run(tmp_path, 1)
    data = run / "checkpoints" / "step-000000001.pt"
    content = data.read_bytes()
    data.unlink()
    with pytest.raises(UserError, match="lacks files that a manifest names"):
        copy(tmp_path)
    assert names(store) == {"metrics.jsonl"}
    store.pipe_file(f"{RUN}/checkpoints/step-000000001.pt", content)
    assert copy(tmp_path) == ExitCode.DONE
    assert {"checkpoints/step-000000001.json", "run.json"} <= names(store)


def test_a_run_that_was_continued_elsewhere_is_left_alone(
    store: MemoryFileSystem, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path, 1)
    copy(tmp_path)
    write_record(tmp_path / "theirs", "noon", "evening")
    store.pipe_file(f"{RUN}/run.json", theirs := (tmp_path / "theirs" / "run.json").read_bytes())
    ours = copier(tmp_path)
    write_record(run, "noon", "night")
    assert ours.follow(lambda seconds: True) == ExitCode.PEERS_LOST
    assert "was continued on another machine" in capfd.readouterr().err
    assert store.cat_file(f"{RUN}/run.json") == theirs


def test_what_could_not_be_copied_is_said_with_the_command_that_does(store: MemoryFileSystem, tmp_path: Path) -> None:
    a_run(tmp_path, 1)
    with pytest.raises(UserError) as refused:
        follow(tmp_path, Breaking(0))
    assert refused.value.exit_code == ExitCode.RESOURCES
    assert f"`python -m ddp_core.remote copy {tmp_path} memory://bucket/runs`" in str(refused.value)
    assert store.store == {}

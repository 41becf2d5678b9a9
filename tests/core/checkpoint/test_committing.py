"""What a save commits, at whichever point it is killed, and what it keeps and removes of those before."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from ddp_core.checkpoint import Checkpointer, Fence, best_checkpoint, find_checkpoints, load, newest_valid, sweep
from ddp_core.checkpoint.committing import POINTS
from ddp_core.checkpoint.manifest import MANIFEST_FORMAT, pointed_step
from tests.core.checkpoint.children import killed_at, state_of
from tests.core.checkpoint.saved import is_whole, leftovers, save_steps, steps_in
from tests.faults.matrix import record_row
from tests.support.mounts import tmpfs
from tests.support.processes import HANG, start
from tests.support.wording import refusing


def test_the_files_are_what_the_document_says(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(state_of(120), step=120, epoch=3, best=True, metric=float("nan"))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["best.json", "latest.json", "step-000000120.json", "step-000000120.pt"]
    manifest = json.loads((tmp_path / "step-000000120.json").read_text())
    assert manifest.keys() == {
        *("format", "step", "epoch", "file", "bytes", "sha256", "shapes", "metadata", "metric", "written_at", "seal")
    }
    assert manifest["format"] == MANIFEST_FORMAT
    assert manifest["shapes"]["model.bias"] == ["float32", [3, 2]]
    assert manifest["metric"] is None
    for pointer in ("latest.json", "best.json"):
        assert json.loads((tmp_path / pointer).read_text())["manifest"] == "step-000000120.json"
    assert set(torch.load(tmp_path / "step-000000120.pt", weights_only=True)) == {"model", "optimizer", "step"}
    assert (tmp_path / "step-000000120.pt").stat().st_mode & 0o077 != 0, "other users of a group could not read it"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_held_checkpoint_stays_until_it_is_let_go(tmp_path: Path, asynchronous: bool) -> None:
    with Checkpointer(tmp_path, keep_last=1, asynchronous=asynchronous) as checkpointer:
        for step in (10, 20, 30, 40):
            checkpointer.save(state_of(step, 10), step=step, epoch=0)
            checkpointer.wait()
            if step == 10:
                checkpointer.hold([5, 10])
            if step == 30:
                assert steps_in(tmp_path) == [30, 10]
                checkpointer.let_go()
                assert steps_in(tmp_path) == [30]
        assert steps_in(tmp_path) == [40]


def test_the_last_ones_the_best_one_and_every_nth_stay(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep_last=2, keep_every=(40, 60)) as checkpointer:
        for step in range(10, 130, 10):
            checkpointer.save(state_of(step, 10), step=step, epoch=0, best=step in (20, 50))
    assert steps_in(tmp_path) == [120, 110, 80, 60, 50, 40]
    assert len(list(tmp_path.glob("*.pt"))) == 6, "data went with its manifest"
    best = best_checkpoint(tmp_path)
    assert best.step == 50
    # The next process keeps the best checkpoint of the process before.
    with Checkpointer(tmp_path, keep_last=1, keep_every=60) as checkpointer:
        checkpointer.save(state_of(130, 10), step=130, epoch=0)
    assert steps_in(tmp_path) == [130, 120, 60, 50]
    # Rolled back to a step before 20: later steps are neither counted nor removed.
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        for step in (20, 30):
            checkpointer.save(state_of(step, 10), step=step, epoch=0)
    assert steps_in(tmp_path) == [130, 120, 60, 50, 30]


def test_a_step_saved_again_replaces_the_one_before_also_beside_its_damaged_manifest(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path)
    for value in (1.0, 2.0, 3.0):
        checkpointer.save({"x": torch.tensor(value)}, step=1, epoch=0)
        [checkpoint] = find_checkpoints(tmp_path)
        assert load(checkpoint)["x"].item() == value
        assert len(list(tmp_path.glob("*.pt"))) == 1
    checkpoint.manifest.write_text("{}")
    save_steps(checkpointer, 1)
    first = checkpointer.last.path
    assert steps_in(tmp_path) == [1]
    save_steps(checkpointer, 1)
    assert not first.exists()
    checkpointer.last.path.unlink()  # somebody else has removed what the next save replaces
    save_steps(checkpointer, 1)
    assert steps_in(tmp_path) == [1]


@pytest.mark.parametrize("data", ["whole", "removed"])
@pytest.mark.parametrize("manifest", ["whole", "{}"])
def test_an_old_checkpoint_goes_with_its_data_also_where_one_of_both_is_damaged(
    tmp_path: Path, manifest: str, data: str
) -> None:
    (tmp_path / "notes.txt").write_text("of the user")
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        save_steps(checkpointer, 1)
        old = checkpointer.last
        if data == "removed":
            old.path.unlink()
        if manifest != "whole":
            old.manifest.write_text(manifest)
        save_steps(checkpointer, 2)
        new = checkpointer.last
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["latest.json", "notes.txt", new.manifest.name, new.path.name]
    )


def test_files_named_before_are_synced_before_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[Path, bool]] = []
    manifest = tmp_path / "step-000000001.json"
    monkeypatch.setattr("ddp_core.checkpoint.committing.sync", lambda path: synced.append((path, manifest.exists())))
    before = [tmp_path / "metrics.jsonl", tmp_path / "log.txt"]
    with Checkpointer(tmp_path, synced_before=before) as checkpointer:
        save_steps(checkpointer, 1)
    assert [(path, False) for path in (tmp_path, *before)] == synced[:3]
    assert (tmp_path, True) in synced


def test_an_old_checkpoint_that_somebody_else_has_removed_is_not_missed(tmp_path: Path) -> None:
    def remove_the_first() -> None:
        # The second is complete then, and what is to be removed has been listed.
        if pointed_step(tmp_path / "latest.json") == 2:
            (tmp_path / "step-000000001.json").unlink(missing_ok=True)

    with Checkpointer(tmp_path, keep_last=1, fence=remove_the_first) as checkpointer:
        save_steps(checkpointer, 1, 2)
    assert steps_in(tmp_path) == [2]
    assert sweep(tmp_path) == []


@pytest.mark.parametrize(
    ("points", "asynchronous", "before"),
    [
        pytest.param(
            ["data renamed", "manifest renamed", "old manifest removed"], False, [10, 20], id="around the commit"
        ),
        pytest.param([POINTS[1], *POINTS[4:9]], True, [], id="the very first save"),
        pytest.param(POINTS, False, [10, 20], marks=pytest.mark.slow, id="now"),
        pytest.param(POINTS, True, [10, 20], marks=pytest.mark.slow, id="aside"),
    ],
)
def test_a_kill_at_any_point_of_a_save_leaves_the_newest_complete_checkpoint(
    tmp_path: Path, points: Sequence[str], asynchronous: bool, before: list[int]
) -> None:
    folders = {point: tmp_path / point.replace(" ", "-") for point in points}
    children = [start(killed_at, folder, point, asynchronous, before, 30) for point, folder in folders.items()]
    for (point, directory), child in zip(folders.items(), children, strict=True):
        child.join(HANG)
        assert child.exitcode == -signal.SIGKILL, f"{point}: the child ended with {child.exitcode}"
        committed = POINTS.index(point) >= POINTS.index("manifest renamed")
        newest, steps = newest_valid(directory), [*before, *([30] if committed else [])]
        assert (newest and newest.step) == (steps[-1] if steps else None), point
        assert newest is None or is_whole(newest), point
        swept = [path.name for path in sweep(directory)]
        assert point != "old manifest removed" or swept == ["step-000000010.pt"], "the data go after their manifest"
        assert leftovers(directory) == set(), point
        with Checkpointer(directory) as checkpointer:
            checkpointer.save(state_of(40), step=40, epoch=0)
        assert is_whole(newest_valid(directory)), point
    if points == POINTS:
        how = f"saved {'aside' if asynchronous else 'at once'}: killed at each of {len(POINTS)} points"
        record_row(9, f"{how}, the newest complete one loads, nothing is left")


def test_a_directory_that_cannot_be_made_or_written_to_is_met_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for directory in (tmp_path / "file", tmp_path / "file" / "checkpoints"):
        with refusing():
            Checkpointer(directory)
        with refusing():
            Fence.take(directory)
    with tmpfs(tmp_path / "fixed", "ro") as directory, refusing():
        Checkpointer(directory)

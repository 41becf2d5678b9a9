"""What is written of checkpoints, kept, found, loaded, removed, refused and said, where no fault is scripted."""

from __future__ import annotations

import datetime
import errno
import functools
import hashlib
import json
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.refusals import human_bytes
from ddp_core.checkpoint import (
    Checkpointer,
    Fence,
    Superseded,
    best_checkpoint,
    describe,
    find_checkpoints,
    load,
    loading,
    newest_valid,
    read_checkpoint,
    sweep,
    verify,
)
from ddp_core.checkpoint.data_file import POINTS
from ddp_core.checkpoint.manifest import MANIFEST_FORMAT, pointed_step
from ddp_core.checkpoint.state import StateTensors
from tests.core.checkpoint.children import state_of
from tests.support.wording import refusing

DOCS = Path(__file__).parents[3] / "docs"
REFERENCE, HOW_TO = DOCS / "reference" / "checkpoints.md", DOCS / "how-to" / "checkpoints-in-your-own-script.md"


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return bool(type(left) is type(right) and left == right)


def trained() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.LazyLinear(4))
    model(torch.randn(2, 3, 8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 8, 8)).square().sum().backward()
        optimizer.step()
        schedule.step()
    return model, optimizer, schedule


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_real_training_state_comes_back_as_it_was(tmp_path: Path, asynchronous: bool) -> None:
    model, optimizer, schedule = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    with Checkpointer(tmp_path, asynchronous=asynchronous) as checkpointer:
        checkpointer.save(state, step=7, epoch=1, metadata={"experiment": "abc", "layout": [2, 1]}, metric=0.5)
    checkpoint = newest_valid(tmp_path)
    assert checkpoint == checkpointer.last
    assert (checkpoint.step, checkpoint.epoch, checkpoint.metric) == (7, 1, 0.5)
    assert checkpoint.metadata == {"experiment": "abc", "layout": [2, 1]}
    assert checkpoint.shapes == describe(state)
    loaded = load(checkpoint, expect=describe(state), expect_metadata={"experiment": "abc"})
    assert same(loaded, state)
    assert loaded["model"]._metadata == state["model"]._metadata  # type: ignore[attr-defined]
    again = trained()
    again[0].load_state_dict(loaded["model"])
    again[1].load_state_dict(loaded["optimizer"])
    again[2].load_state_dict(loaded["schedule"])


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


def test_every_point_of_a_save_is_passed_in_the_documented_order(tmp_path: Path) -> None:
    passed: list[str] = []
    checkpointer = Checkpointer(tmp_path, keep_last=1, at=passed.append)
    checkpointer.save(state_of(10), step=10, epoch=0, best=True)
    passed.clear()
    checkpointer.save(state_of(20), step=20, epoch=0, best=True)
    assert passed == list(POINTS)
    text = REFERENCE.read_text().partition("## The order of the writes")[2]
    places = [text.index(f"`{point}`") for point in POINTS]
    assert places == sorted(places)


def test_tied_tensors_stay_tied_views_take_only_their_own_bytes_and_parameters_are_plain(tmp_path: Path) -> None:
    weight, large = torch.randn(100, 100), torch.randn(1_000_000)
    number = torch.randn(5, dtype=torch.complex64)
    state = {
        "a": weight,
        "b": weight,
        "lazy": {"number": number, "conjugate": number.conj(), "negative": number.conj().imag},
        "view": large[:10],
        "wide": torch.ones(1).expand(50),
        "turned": weight.t()[:3],
        "parameter": nn.Parameter(torch.ones(2)),
        "grown": torch.ones(2).requires_grad_(),
    }
    for asynchronous in (False, True):
        directory = tmp_path / str(asynchronous)
        with Checkpointer(directory, asynchronous=asynchronous) as checkpointer:
            checkpointer.save(state, step=1, epoch=0)
        checkpoint = find_checkpoints(directory)[0]
        assert checkpoint.bytes < 60_000
        loaded = load(checkpoint)
        assert same(loaded, state)
        assert loaded["a"].data_ptr() == loaded["b"].data_ptr()
        assert [type(loaded[name]) for name in ("parameter", "grown")] == [torch.Tensor] * 2
        assert not loaded["parameter"].requires_grad
        assert not loaded["grown"].requires_grad
    assert {type(each) for each in StateTensors(state).tensors} == {torch.Tensor}
    assert StateTensors({"a": weight}).tensors[0] is weight


def test_what_could_not_be_read_back_is_refused_with_its_key(tmp_path: Path) -> None:
    tensors = (torch.eye(2).to_sparse(), torch.empty(2, device="meta"))
    for value in (SimpleNamespace(), np.float64(1.0), Path("x"), b"bytes", {None: 2}, {(1, b"x"): 2}, {1, 2}, *tensors):
        with refusing(TypeError):
            Checkpointer(tmp_path).save({"outer": [{"inner": value}]}, step=1, epoch=0)
    assert list(tmp_path.iterdir()) == []


def test_misuse_is_a_programmers_error(tmp_path: Path) -> None:
    for options in ({"keep_last": 0}, {"keep_every": 0}):
        with refusing(ValueError):
            Checkpointer(tmp_path, **options)
    with pytest.raises(TypeError):
        Checkpointer(tmp_path).save({}, step=1, epoch=0, metadata={"path": Path("x")})
    deep = functools.reduce(lambda inner, _: [inner], range(200), list[Any]())
    for metadata in ({"deep": deep}, {"loss": float("nan")}):
        with refusing(ValueError):
            Checkpointer(tmp_path).save({}, step=1, epoch=0, metadata=metadata)
    assert find_checkpoints(tmp_path) == []
    with pytest.raises(TypeError, match=r"state\['a'\] has a key .* of type object"):
        describe({"a": {object(): torch.ones(1)}})
    with pytest.raises(ValueError, match=r"a\.b"):
        describe({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)})


_leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.builds(
        lambda dtype, sizes: torch.ones(sizes, dtype=dtype),
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64]),
        st.lists(st.integers(0, 3), max_size=3),
    ),
)
_plain_keys = st.one_of(st.integers(0, 99), st.floats(0, 1), st.text("abc", min_size=1, max_size=3))
_keys = st.one_of(_plain_keys, st.tuples(_plain_keys, _plain_keys))
_trees = st.dictionaries(
    _keys,
    st.recursive(
        _leaves,
        lambda inner: st.one_of(st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(_keys, inner)),
        max_leaves=12,
    ),
)


@pytest.mark.full
@settings(max_examples=25, deadline=None)
@given(state=_trees, asynchronous=st.booleans())
def test_any_tree_of_tensors_and_plain_values_comes_back(
    tmp_path_factory: pytest.TempPathFactory, state: dict[Any, Any], asynchronous: bool
) -> None:
    try:
        describe(state)
    except ValueError:
        return  # such as a dict with both keys, 1 and "1"
    directory = tmp_path_factory.mktemp("tree")
    with Checkpointer(directory, asynchronous=asynchronous) as checkpointer:
        checkpointer.save(state, step=0, epoch=0)
    assert same(load(find_checkpoints(directory)[0]), state)


def _steps(directory: Path) -> list[int]:
    return [checkpoint.step for checkpoint in find_checkpoints(directory)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_held_checkpoint_stays_until_it_is_let_go(tmp_path: Path, asynchronous: bool) -> None:
    with Checkpointer(tmp_path, keep_last=1, asynchronous=asynchronous) as checkpointer:
        for step in (10, 20, 30, 40):
            checkpointer.save(state_of(step, 10), step=step, epoch=0)
            checkpointer.wait()
            if step == 10:
                checkpointer.hold([5, 10])
            if step == 30:
                assert _steps(tmp_path) == [30, 10]
                checkpointer.let_go()
                assert _steps(tmp_path) == [30]
        assert _steps(tmp_path) == [40]


def test_the_last_ones_the_best_one_and_every_nth_stay(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep_last=2, keep_every=(40, 60)) as checkpointer:
        for step in range(10, 130, 10):
            checkpointer.save(state_of(step, 10), step=step, epoch=0, best=step in (20, 50))
    assert _steps(tmp_path) == [120, 110, 80, 60, 50, 40]
    assert len(list(tmp_path.glob("*.pt"))) == 6, "data went with its manifest"
    best = best_checkpoint(tmp_path)
    assert best.step == 50
    # The next process keeps the best checkpoint of the process before.
    with Checkpointer(tmp_path, keep_last=1, keep_every=60) as checkpointer:
        checkpointer.save(state_of(130, 10), step=130, epoch=0)
    assert _steps(tmp_path) == [130, 120, 60, 50]
    # Rolled back to a step before 20: later steps are neither counted nor removed.
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        for step in (20, 30):
            checkpointer.save(state_of(step, 10), step=step, epoch=0)
    assert _steps(tmp_path) == [130, 120, 60, 50, 30]


def test_another_process_can_be_told_which_checkpoint_where_there_is_one(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        assert newest_valid(place) is best_checkpoint(place) is None
        assert find_checkpoints(place) == sweep(place) == []
    Checkpointer(tmp_path).save(state_of(3), step=3, epoch=0)
    chosen = newest_valid(tmp_path)
    for path in (chosen.path, chosen.manifest):
        assert read_checkpoint(path, sha256=chosen.sha256) == chosen
        with refusing():
            read_checkpoint(path, sha256="0" * 64)
    verify(chosen)


def test_every_kind_of_file_that_a_dead_writer_leaves_is_swept(tmp_path: Path) -> None:
    targets = ("latest.json", "best.json", "fence.json", "step-000000009.pt", "step-000000009.json")
    for name in (*targets, "notes.json"):
        (tmp_path / f".{name}.0123456789ab.tmp").touch()
    assert {path.name for path in sweep(tmp_path)} == {f".{name}.0123456789ab.tmp" for name in targets}


@pytest.mark.parametrize("error", [OSError(errno.ENOLCK, "No locks available"), FileNotFoundError()])
def test_what_cannot_be_swept_is_said_unless_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def fail(descriptor: int) -> bool:
        raise error

    (tmp_path / "step-000000009.pt").touch()
    monkeypatch.setattr(loading, "take_lock", fail)
    said: list[str] = []
    assert sweep(tmp_path, said.append) == []
    assert said == [f"warning: cannot sweep {tmp_path}/step-000000009.pt: No locks available"] * (
        error.errno is not None
    )


def test_the_examples_of_the_document_run_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", HOW_TO.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        for _ in range(2):  # the second run resumes the first
            exec(compile(block, str(HOW_TO), "exec"), {})
    assert find_checkpoints(tmp_path / "checkpoints")


def save_steps(checkpointer: Checkpointer, *steps: int) -> None:
    for step in steps:
        checkpointer.save(state_of(step), step=step, epoch=0)


def is_now(text: str) -> bool:
    written = datetime.datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=datetime.UTC)
    return abs((datetime.datetime.now(datetime.UTC) - written).total_seconds()) < 120


def test_times_are_those_of_greenwich(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        with Checkpointer(tmp_path) as checkpointer:
            save_steps(checkpointer, 1)
        Fence.take(tmp_path)
    finally:
        monkeypatch.undo()
        time.tzset()
    content = json.loads((tmp_path / "fence.json").read_text())
    assert is_now(checkpointer.last.written_at)
    assert is_now(content["since"])
    assert content["holder"].startswith(f"process {os.getpid()} on ")


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
    assert _steps(tmp_path) == [1]
    save_steps(checkpointer, 1)
    assert not first.exists()
    checkpointer.last.path.unlink()  # somebody else has removed what the next save replaces
    save_steps(checkpointer, 1)
    assert _steps(tmp_path) == [1]


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


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("where", ["free_bytes", "sync"])
def test_what_the_disk_refuses_names_the_file_and_what_it_would_have_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, where: str
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    free = iter([1 << 40])  # there was room when the save began
    if where == "sync":
        answer = functools.partial(SimpleNamespace, f_frsize=1, f_blocks=99, f_bfree=99, f_files=9, f_favail=9)
        monkeypatch.setattr(os, "statvfs", lambda path: answer(f_bavail=next(free, 10)))
    with Checkpointer(tmp_path) as checkpointer:
        monkeypatch.setattr(f"ddp_core.checkpoint.committing.{where}", refuse)
        with pytest.raises(UserError, match=r"step-000000003.*\.pt") as raised:
            save_steps(checkpointer, 3)
    assert raised.value.exit_code == ExitCode.RESOURCES
    assert isinstance(raised.value.__cause__, OSError)
    assert errno.errorcode[number] in str(raised.value) or number == errno.ENOSPC
    if number == errno.ENOSPC and where == "sync":
        needed = human_bytes(StateTensors(state_of(3)).bytes_needed())
        assert f"needs {needed}, has 10 bytes for {tmp_path}" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_is_told_with_its_size_and_seconds(tmp_path: Path, asynchronous: bool) -> None:
    lines: list[str] = []
    with Checkpointer(tmp_path, asynchronous=asynchronous, on_event=lines.append) as checkpointer:
        assert checkpointer.last is None
        for step in (1, 2, 3):
            checkpointer.save(state_of(step), step=step, epoch=0, best=step == 1)
            checkpointer.before_update()
        checkpointer.close()
        checkpointer.save(state_of(4), step=4, epoch=0)  # a closed one begins anew
    stood = r", training stood still for (\d+\.\d{3}) s" if asynchronous else ""
    for step, line in enumerate(lines, start=1):
        found = re.fullmatch(rf"checkpoint of step {step}: \d+(\.\d+)? \w+ in (\d+\.\d{{3}}) s{stood}", line)
        assert found is not None, line
        assert all(float(seconds) < 60 for seconds in found.groups()[1:])
    assert _steps(tmp_path) == [4, 3, 1], "two are kept, and the best one"


def test_a_save_that_is_given_up_is_told_with_its_step(tmp_path: Path) -> None:
    lines: list[str] = []
    answers = iter([True])
    with (
        pytest.raises(Superseded),
        Checkpointer(tmp_path, fence=lambda: next(answers, False), on_event=lines.append) as checkpointer,
    ):
        checkpointer.save(state_of(5), step=5, epoch=0)
    assert lines[0].startswith("warning: checkpoint of step 5 given up: this process may no longer write to")


@pytest.mark.parametrize(
    "fields",
    [
        *({"format": "ddp-checkpoint/9"}, {"step": [30]}, {"step": 2.0}, {"file": 5}, {"sha256": 7}, {"shapes": []}),
        *({"parts": [7]}, {"parts": 7}, {"more": 1}, {"metric": float("nan")}),
    ],
    ids=str,
)
def test_a_manifest_with_other_types_counts_as_damaged(tmp_path: Path, fields: dict[str, Any]) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        save_steps(checkpointer, 1, 2)
    path = tmp_path / "step-000000002.json"
    content = {name: value for name, value in json.loads(path.read_text()).items() if name != "seal"} | fields
    seal = hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    for text in (json.dumps(content | {"seal": seal}), '{"format": "ddp-checkpoint/1"}', "[" * 100_000, "\x00"):
        path.write_text(text)
        lines: list[str] = []
        found = newest_valid(tmp_path, lines.append)
        assert (found.step, len(lines)) == (1, 2)
        assert "checkpoint step-000000002 is damaged" in lines[0]


@pytest.mark.parametrize("text", ['{"step": 1e400}', '{"step": "1"}', '{"step": -1}', "[" * 100_000, "\x00"])
def test_a_pointer_that_points_nowhere_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "best.json").write_text(text)
    assert pointed_step(tmp_path / "best.json") is None


def test_an_old_checkpoint_that_somebody_else_has_removed_is_not_missed(tmp_path: Path) -> None:
    def remove_the_first() -> None:
        # The second is complete then, and what is to be removed has been listed.
        if pointed_step(tmp_path / "latest.json") == 2:
            (tmp_path / "step-000000001.json").unlink(missing_ok=True)

    with Checkpointer(tmp_path, keep_last=1, fence=remove_the_first) as checkpointer:
        save_steps(checkpointer, 1, 2)
    assert _steps(tmp_path) == [2]
    assert sweep(tmp_path) == []


def test_a_save_does_without_a_niceness_that_the_system_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    with Checkpointer(tmp_path, asynchronous=True) as checkpointer:
        checkpointer.save(state_of(1), step=1, epoch=0)
    assert len(find_checkpoints(tmp_path)) == 1

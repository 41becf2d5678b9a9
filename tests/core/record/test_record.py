"""run.json from the start to the end of a run: by rank 0 alone, only while it is the latest, and over all attempts."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ddp_core.base.digests import weights_digest
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.fingerprint import fingerprint, fingerprint_differences, of_all_ranks
from ddp_core.checkpoint import Superseded
from ddp_core.config.layout import Layout
from ddp_core.config.options import Options
from ddp_core.data.data_digest import DataDigest
from ddp_core.distributed.process_group import Collectives
from ddp_core.distributed.stop import Stopped
from ddp_core.distributed.world import World
from ddp_core.experiment.file import LoadedExperiment
from ddp_core.experiment.request import Request
from ddp_core.experiment.source import Source
from ddp_core.record import run_record as record_module
from ddp_core.record.directory import RunDirectory
from ddp_core.record.result import gather_ends
from ddp_core.record.run_record import Origin, RunRecord
from ddp_core.trainers import Trainer
from tests.core.trainers.test_trainers import CPU, experiment, finished
from tests.support.records import NO_USAGE, a_record
from tests.support.wording import refusing

ORIGIN = Origin(
    Source("mine.py", {"mine.py": b"x = 1\n"}, {}),
    DataDigest("0" * 64, "content, given by the builder"),
    fingerprint(CPU),
)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    # The real one asks git, which takes its time.
    monkeypatch.setattr(record_module, "describe_environment", lambda: a_record()["environment"])
    return RunDirectory.create(tmp_path, experiment(), Layout())


def begun(
    directory: RunDirectory,
    world: World | None = None,
    start: bool = True,
    every: Sequence[Mapping[str, Any]] = (fingerprint(CPU),),
    **options: Any,
) -> RunRecord:
    loaded = LoadedExperiment(experiment(), {}, Path("mine.py"), "", "")
    request = Request(loaded, Layout(), Options(**options))
    origin = replace(ORIGIN, fingerprint=of_all_ranks(every))
    record = RunRecord(request, Collectives(world or World(), CPU), directory, origin, steps_per_epoch=4)
    if start:
        record.begun = record.start()
    record.usage.start()
    return record


def end(record: RunRecord, error: Exception) -> None:
    with record.outcome():
        raise error


ENDS: dict[str, tuple[Exception, tuple[str, int]]] = {
    "stopped": (Stopped("SIGTERM", 3), ("stopped", ExitCode.STOPPED)),
    "a mistake": (UserError("loss is nan", ExitCode.NUMERICS), ("failed", ExitCode.NUMERICS)),
    "a fault": (ZeroDivisionError("here"), ("failed", ExitCode.INTERNAL)),
    "a lost peer": (torch.distributed.DistBackendError("closed"), ("failed", ExitCode.PEERS_LOST)),
}


def test_a_full_disk_is_told_with_the_place_of_the_run(directory: RunDirectory) -> None:
    with pytest.raises(UserError, match=f"^rank 0 .node 0.: no room for {directory.path}/x .ENOSPC., though") as caught:
        end(begun(directory), OSError(errno.ENOSPC, "No space left on device", str(directory.path / "x")))
    assert caught.value.exit_code == ExitCode.RESOURCES


def test_ranks_on_unlike_devices_are_named_and_refused_in_strict(directory: RunDirectory) -> None:
    own = fingerprint(CPU)
    unlike = [own, own, {**own, "device": "H100"}]
    record = begun(directory, every=unlike, reduction="exact")
    assert record.notes == [
        "warning: rank 2 computes on something else than rank 0 (device: here cpu, there H100), so other layouts need "
        "not end with the same bits"
    ]
    recorded = directory.read()["fingerprint"]
    assert recorded["unlike_ranks"] == {"2": ["device: here cpu, there H100"]}
    assert fingerprint_differences(recorded, begun(directory, start=False).fingerprint)
    with refusing():
        begun(directory, every=unlike, reduction="exact", guard="strict")
    assert begun(directory, every=unlike, reduction="plain").notes == []


def files_of(directory: RunDirectory) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.path.rglob("*") if path.is_file()}


@pytest.mark.parametrize("what", ENDS)
def test_how_a_run_ended_is_written_by_rank_0_alone(directory: RunDirectory, what: str) -> None:
    error, expected = ENDS[what]
    first = begun(directory)
    before = (directory.path / "run.json").read_bytes()
    other = begun(directory, World(rank=1, world_size=2), start=False)
    with pytest.raises(Exception):  # noqa: B017, PT011
        end(other, error)
    assert (directory.path / "run.json").read_bytes() == before
    with pytest.raises(Exception):  # noqa: B017, PT011
        end(first, error)
    record = directory.read()
    assert (record["status"], record["exit_code"]) == expected
    assert record["message"]
    assert record["finished_at"]
    traces = {path.name: path.read_text() for path in directory.path.glob("error-*")}
    assert traces.keys() == ({"error-rank-0.txt", "error-rank-1.txt"} if what == "a fault" else set())
    assert all("ZeroDivisionError: here" in trace for trace in traces.values())


@pytest.mark.parametrize(
    "error",
    [UserError("disk full", ExitCode.RESOURCES), UserError("no readable run.json"), OSError(errno.EIO, "Input/output")],
)
def test_where_the_record_cannot_be_written_the_user_is_told_of_the_failure_itself(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    record = begun(directory)

    def fail(**_: Any) -> None:
        raise error

    monkeypatch.setattr(directory, "update", fail)
    with refusing():
        end(record, UserError("loss is nan", ExitCode.NUMERICS))


@pytest.mark.parametrize("what", ENDS)
def test_a_superseded_rank_0_leaves_the_record_to_its_successor(directory: RunDirectory, what: str) -> None:
    late = begun(directory)
    begun(directory)
    before = (directory.path / "run.json").read_bytes()
    with pytest.raises(Superseded):
        end(late, ENDS[what][0])
    assert (directory.path / "run.json").read_bytes() == before


def test_a_superseded_rank_0_leaves_the_result_to_its_successor(directory: RunDirectory) -> None:
    trainer = finished(experiment(max_steps=1))
    late = begun(directory)
    begun(directory)
    before = files_of(directory)
    with pytest.raises(Superseded):
        late.finish(trainer, {})
    begun(directory, World(rank=1, world_size=2), start=False).finish(trainer, {})
    assert files_of(directory) == before, "nor does another rank write it"


def test_a_change_of_the_fingerprint_is_remembered_in_all_later_attempts(directory: RunDirectory) -> None:
    seen = []
    for threads in (1, 1, 2, 2, 1):
        notes = begun(directory, every=[{**fingerprint(CPU), "threads": threads}]).notes
        seen.append((directory.read()["fingerprint_changed"], ["threads" in note for note in notes]))
    assert seen == [(False, []), (False, []), (True, [True]), (True, []), (True, [True])]


def test_a_new_attempt_goes_on_with_the_record_of_those_before(directory: RunDirectory) -> None:
    begun(directory)
    directory.update(
        started_at="2026-01-01T00:00:00Z", status="failed", exit_code=6, message="lost", result={"steps": 3}
    )
    second = begun(directory)
    record = directory.read()
    assert second.begun.attempt == 1
    assert len(record["attempts"]) == 2
    assert record["started_at"] == "2026-01-01T00:00:00Z"
    assert record["result"] == {"steps": 3}
    assert [record[name] for name in ("status", "exit_code", "message", "finished_at")] == ["running", None, None, None]


def test_the_end_is_kept_told_and_dated(directory: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = finished(experiment(max_steps=1, ema_decay=0.9))
    record = begun(directory)
    record.started = 0.0
    record.start()
    record.finish(trainer, {})
    average = trainer.state.average
    assert average is not None
    assert directory.read()["attempts"][-1]["started_at"] == "1970-01-01T00:00:00Z"
    for name, module in (("model", trainer.state.model), ("model_ema", average.module)):
        assert weights_digest(load_file(directory.path / f"{name}.safetensors")) == weights_digest(module.state_dict())
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in told[-2:]] == ["done:", "weights"]
    assert "train loss" in told[-2]


class TwoRanks(Collectives):
    """Rank 0 of two; the other reports the same but for one change."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__(World(), CPU)
        self._change = change

    def gather(self, value: Any) -> list[Any]:
        return [value, self._change(value)]


def _with_another(place: int, tensor: str) -> Callable[[Any], Any]:
    """What is gathered, with another value on the other rank: the digests of all, or the checksums of the tensors."""

    def change(part: Any) -> Any:
        if isinstance(part, str):
            return "another"
        if isinstance(part, set):  # which methods its callbacks have
            return part
        if isinstance(part, list):
            assert tensor in dict(part)
            return [(name, "another" if name == tensor else value) for name, value in part]
        digests, *rest = part
        return (tuple("another" if number == place else each for number, each in enumerate(digests)), *rest)

    return change


def _ends(trainer: Trainer) -> Any:
    return gather_ends(trainer, {}, NO_USAGE)


@pytest.mark.parametrize(("place", "tensor"), [(0, "parameter 2.bias"), (1, "the averaged 0.weight")])
def test_ranks_that_ended_with_other_weights_are_named(place: int, tensor: str) -> None:
    trainer = finished(experiment(max_steps=1, ema_decay=0.9), collectives=TwoRanks(_with_another(place, tensor)))
    with pytest.raises(
        UserError, match=rf"after step 1 {tensor} is not the same on all ranks \(differs: 0, 1 of 2"
    ) as refused:
        _ends(trainer)
    assert refused.value.exit_code == ExitCode.BAD_INPUT


def test_ranks_that_ended_with_the_same_weights_are_believed() -> None:
    trainer = finished(experiment(max_steps=1, ema_decay=0.9), collectives=TwoRanks(lambda part: part))
    ends = _ends(trainer)
    assert len(ends.weights) == len(ends.average) == 64

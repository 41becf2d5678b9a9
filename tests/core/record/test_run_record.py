"""run.json from the start to the end of a run: by rank 0 alone, only while it is the latest, and over all attempts.

Tests record/result.py, too.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ddp_core.base.digests import weights_digest
from ddp_core.base.errors import ExitCode, UserError
from ddp_core.base.fingerprint import fingerprint, fingerprint_differences, of_all_ranks
from ddp_core.checkpoint import Fence, Superseded
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
from ddp_core.record.result import gather_ends, result_of, save_weights, summary
from ddp_core.record.run_record import Origin, RunRecord
from ddp_core.record.weights import exchanged_weights
from tests.core.trainers.builders import CPU, experiment, finished
from tests.support.records import NO_USAGE, a_record
from tests.support.wording import refusing, said_as_before

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


@pytest.mark.parametrize(("place", "tensor"), [(0, "parameter 2.bias"), (1, "the averaged 0.weight")])
def test_ranks_that_ended_with_other_weights_are_named(place: int, tensor: str) -> None:
    trainer = finished(experiment(max_steps=1, ema_decay=0.9), collectives=TwoRanks(_with_another(place, tensor)))
    with refusing():
        gather_ends(trainer, {}, NO_USAGE)


def test_the_last_line_has_loss_metrics_single_values_and_speed() -> None:
    figures = {"train_loss": 0.25, "test_accuracy": 0.5, "ema_test_loss": 1.5, "seconds": 9.0}
    said_as_before(summary(figures | {"values": {"weight": [2.0], "many": [3.0, 4.0]}, "samples_per_second": 1234.4}))
    assert summary({"samples_per_second": None}) == ""


def test_what_shares_memory_in_part_is_written_whole(tmp_path: Path) -> None:
    table, chunks = torch.arange(6.0).view(2, 3), torch.arange(4.0).chunk(2)
    state = {"table": table, "tied": table, "row": table[0], "turned": table.t(), "first": chunks[0], "last": chunks[1]}
    save_weights(state, tmp_path / "model.safetensors", Fence.take(tmp_path))
    (tmp_path / "other").touch()
    modes = {(tmp_path / name).stat().st_mode for name in ("model.safetensors", "other")}
    assert len(modes) == 1, "whoever may read the record may read the weights"
    assert load_file(tmp_path / "model.safetensors").keys() == state.keys() - {"tied"}
    assert exchanged_weights(tmp_path, {"weights_sha256": weights_digest(state)}) is None


def test_a_former_rank_0_leaves_the_weights_of_its_successor(tmp_path: Path) -> None:
    file, model, other = tmp_path / "model.safetensors", nn.Linear(2, 3), nn.Linear(2, 3)
    former = Fence.take(tmp_path)
    save_weights(model.state_dict(), file, Fence.take(tmp_path))
    with pytest.raises(Superseded):
        save_weights(other.state_dict(), file, former)
    assert weights_digest(load_file(file)) == weights_digest(model.state_dict())
    assert not list(tmp_path.glob("*.tmp"))
    with refusing():
        save_weights(model.state_dict(), tmp_path / "no" / "folder", Fence.take(tmp_path))


class OfComplexNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, dtype=torch.complex64))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.flatten(1)[:, :1] * torch.view_as_real(self.weight).reshape(1, -1)


def test_few_parameters_are_recorded_with_their_values_complex_ones_with_both_parts(tmp_path: Path) -> None:
    trainer = finished(experiment(max_steps=1), OfComplexNumbers)
    weights = trainer.state.model.state_dict()
    values = result_of(trainer, weights, tmp_path / "metrics.jsonl", 1.0)["values"]["weight"]
    assert values == torch.view_as_real(weights["weight"]).flatten().tolist()

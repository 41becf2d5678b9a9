"""`ddp compare`: runs side by side, read from their records alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ddp_core.base.errors import UserError
from ddp_core.cli.compare import compare_runs, table, verdict
from ddp_core.cli.entry import main
from ddp_core.config.layout import Layout
from ddp_core.config.options import Options
from ddp_core.record.directory import RunDirectory
from tests.support.commands import ROOT
from tests.support.records import EXPERIMENT, a_record

OTHER = EXPERIMENT.model_copy(update={"name": "other"})
PLAIN = Options(reduction="plain").model_dump(mode="json")

SINGLE, DP, DDP = Layout(), Layout(kind="dp", nproc_per_node=2), Layout(kind="ddp", nnodes=2, nproc_per_node=2)


def record(layout: Layout = SINGLE, speed: float = 1000.0, weights: str = "a" * 64, **fields: Any) -> dict[str, Any]:
    result = {
        "test_accuracy": 0.9889,
        "test_loss": 0.04321,
        "samples_per_second": speed,
        "peak_memory_bytes": 300_000_000,
        "step_memory_bytes": 250_000_000,
        "data_wait": 0.031,
        "steps": 8,
    }
    completed = {"status": "completed", "weights_sha256": weights, "result": result}
    return a_record(**{"layout": layout, "experiment_sha256": "e"} | completed | fields)


def write(output: Path, number: int, content: dict[str, Any]) -> RunDirectory:
    directory = RunDirectory(output / f"run-{number}")
    directory.path.mkdir(parents=True)
    directory.write(content)
    return directory


def rows(output: Path, *records: dict[str, Any]) -> list[list[str]]:
    runs = [(write(output, number, content), content) for number, content in enumerate(records)]
    lines = table(runs, "mine").splitlines()
    header = lines[1]
    starts = [
        index
        for index in range(len(header))
        if header[index] != " " and header[max(0, index - 2) : index].strip() == ""
    ]
    return [
        [line[left:right].strip() for left, right in zip(starts, [*starts[1:], None], strict=True)]
        for line in lines[1:]
    ]


def test_the_table_holds_speed_quality_memory_and_digest(tmp_path: Path) -> None:
    header, _, single, dp, ddp, *_ = rows(tmp_path, record(), record(DP, 1500.0), record(DDP, 3000.0))
    assert header == [
        "layout",
        "world",
        "reduction",
        "samples/s",
        "speed-up",
        "accuracy",
        "loss",
        "memory",
        "data wait",
        "weights",
        "run",
    ]
    assert single == [
        "single-cpu",
        "1",
        "exact",
        "1000",
        "1.00x",
        "0.9889",
        "0.04321",
        "300 MB",
        "3.1%",
        "a" * 12,
        "run-0",
    ]
    assert dp[:5] == ["dp-2-cpu (threads)", "2", "exact", "1500", "1.50x"]
    assert ddp[:5] == ["ddp-2x2-cpu", "4", "exact", "3000", "3.00x"]


def test_the_experiments_own_figures_have_columns(tmp_path: Path) -> None:
    own = {"test_loss": 0.5, "test_right": 7, "test_mean_f1": 0.123456, "test_confusion": [[1]], "test_c": None}
    single, ddp = record(result=own | {"test_c": 1.0, "test_d": 1.0, "test_e": 1.0}), record(DDP, result=own)
    header, _, first, second, *_ = rows(tmp_path, single, ddp)
    assert header[5:10] == ["right", "mean f1", "c", "d", "loss"]
    assert first[5:10] == ["7", "0.1235", "1.0000", "1.0000", "0.50000"]
    assert second[5:10] == ["7", "0.1235", "-", "-", "0.50000"]
    without = rows(tmp_path / "without", record(result={"train_loss": 0.5}))
    assert without[0][4:6] == ["speed-up", "loss"]


def test_the_memory_is_that_of_steps_where_a_run_is_sharded(tmp_path: Path) -> None:
    unknown = {"step_memory_bytes": 250_000_000}
    header, _, single, ddp, *_ = rows(
        tmp_path, record(result=unknown), record(Layout(kind="ddp", nproc_per_node=2, shard="optimizer"))
    )
    assert header[7:9] == ["memory", "in steps"]
    assert (single[8], ddp[8]) == ("250 MB", "250 MB")


def test_without_a_single_run_there_is_no_speed_up(tmp_path: Path) -> None:
    assert rows(tmp_path, record(DDP))[2][4] == "-"


def test_a_run_without_a_result_is_shown_with_its_status(tmp_path: Path) -> None:
    unfinished = {"weights_sha256": None, "result": {}}
    header, _, failed, interrupted, *_ = rows(
        tmp_path, record(status="failed", **unfinished), record(status="running", **unfinished)
    )
    assert header[8:10] == ["status", "weights"]
    assert failed[3:10] == ["-", "-", "-", "-", "-", "failed", "-"]
    assert interrupted[8:10] == ["interrupted", "-"], "nobody holds the lock of that directory"


def test_equal_digests_are_identical() -> None:
    assert "identical" in verdict([record(), record(DDP)])
    assert "identical" not in verdict([record()])
    assert "identical" not in verdict([record(), record(DDP, options=PLAIN)])
    assert "identical" not in verdict([record(), record(DDP, status="failed")])


def test_other_digests_are_told_from_other_fingerprints() -> None:
    assert "one fingerprint" in verdict([record(), record(DDP, weights="b" * 64)])
    elsewhere = verdict([record(), record(DDP, weights="b" * 64, fingerprint={"threads": 2})])
    assert "threads: here 1, there 2" in elsewhere
    assert "one fingerprint" not in elsewhere


def test_other_digests_of_other_code_or_data_are_no_surprise() -> None:
    edited = {"source": {"files": {"mine.py": "1"}}, "data_sha256": "2", "fingerprint": {"threads": 2}}
    said = verdict([record(), record(DDP, weights="b" * 64, **edited)])
    assert said == "digests: 2 different ones, of other code and other data"
    assert verdict([record(), record(DDP, weights="b" * 64, init_from={"sha256": "3"})]).endswith("initial weights")


def test_a_run_whose_promise_is_broken_is_marked_and_no_reference(tmp_path: Path) -> None:
    broken = {"promise_broken": {"step": 3, "what": "other bits", "attempt": 0}}
    assert verdict([record(), record(DDP, **broken)]).endswith(
        "fewer than two completed exact runs to compare; left out: promise broken in step 3"
    )
    said = verdict([record(), record(DP), record(DDP, weights="b" * 64, **broken)])
    assert said == f"digests: 2 exact runs, identical ({'a' * 16}…); left out: promise broken in step 3"
    _, _, whole, marked, note, *_ = rows(tmp_path, record(), record(DDP, **broken))
    assert (whole[9], marked[9]) == ("a" * 12, "a" * 12 + " !")
    assert "".join(note).replace(" ", "") == "!run-1:promisebrokeninstep3:otherbits"


def test_data_that_were_not_digested_as_a_whole_say_so(tmp_path: Path) -> None:
    whole, sample, random = (
        {"data_sha256": digest, "data": {"digest_of": "", "parts": 0, "sampled": sampled}}
        for digest, sampled in (("1", False), ("1", True), (None, False))
    )
    assert "data" not in rows(tmp_path / "whole", record(**whole), record(DDP, **whole))[0]
    header, _, first, second, third, *_ = rows(tmp_path, record(**whole), record(DDP, **sample), record(DDP, **random))
    assert [line[header.index("data")] for line in (first, second, third)] == ["whole", "sample", "random"]
    sampled = verdict([record(**sample), record(DDP, weights="b" * 64, **sample)])
    assert "under one fingerprint (their data were compared by a sample)" in sampled
    changing = verdict([record(**random), record(DDP, weights="b" * 64, **random)])
    assert changing.endswith("of data that differ from one read to the next")


def test_other_weights_under_one_fingerprint_end_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = {"fingerprint": {"threads": 2}}
    write(tmp_path, 0, record())
    write(tmp_path, 1, record(DP, weights="b" * 64, **elsewhere))
    assert compare_runs([tmp_path]) == 0, "nothing is promised between these"
    write(tmp_path, 2, record(DDP, weights="c" * 64, **elsewhere))
    assert compare_runs([tmp_path]) == 1, "the first run explains neither of the other two"
    assert "3 different ones under one fingerprint" in capsys.readouterr().out
    assert compare_runs([tmp_path], as_json=True) == 1
    assert compare_runs([tmp_path], checks=False) == 0


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_the_command_has_a_way_to_the_table_alone(tmp_path: Path, form: tuple[str, ...]) -> None:
    write(tmp_path, 0, record())
    write(tmp_path, 1, record(DDP, weights="b" * 64))
    assert main(["compare", str(tmp_path), *form]) == 1
    assert main(["compare", str(tmp_path), *form, "--no-check"]) == 0


def test_a_place_without_runs_is_an_error_also_beside_others(tmp_path: Path) -> None:
    run = write(tmp_path, 0, record())
    missing = tmp_path / "missing"
    with pytest.raises(UserError, match=f"no runs in {missing};") as raised:
        compare_runs([run.path, missing])
    assert raised.value.exit_code == 2


def test_a_run_that_is_named_twice_is_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path, 0, record())
    assert compare_runs([tmp_path, run.path]) == 0
    assert "fewer than two completed exact runs" in capsys.readouterr().out


def test_runs_that_were_refused_are_counted_and_shown_where_they_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, 0, record())
    refused = write(tmp_path, 1, record(DDP, status="failed", exit_code=2, weights_sha256=None, result={}))
    trained = write(tmp_path, 2, record(DP, status="failed", exit_code=2, weights_sha256=None, result={}))
    trained.metrics.write_text('{"kind": "step", "step": 1}\n')
    compare_runs([tmp_path])
    said = capsys.readouterr()
    assert refused.path.name not in said.out
    assert trained.path.name in said.out
    assert said.err == "ddp: left out: 1 that ended as bad input before the first step; name one to see it\n"
    compare_runs([refused.path])
    assert refused.path.name in capsys.readouterr().out


def test_tables_of_one_name_say_what_sets_them_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    longer = EXPERIMENT.model_copy(update={"epochs": 7, "seed": 3})
    write(tmp_path, 0, record(experiment=longer, experiment_sha256="f"))
    write(tmp_path, 1, record())
    write(tmp_path, 2, record(DDP))
    compare_runs([tmp_path])
    titles = [line for line in capsys.readouterr().out.splitlines() if line.startswith("mine") and " over " not in line]
    assert titles == ["mine, seed=3, epochs=7", "mine"]


def test_each_experiment_has_a_table_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, record())
    write(tmp_path, 1, record(experiment=OTHER, experiment_sha256="f"))
    assert compare_runs([tmp_path]) == 0
    output = capsys.readouterr().out
    assert output.count("samples/s") == 2
    assert {"mine", "other"} <= set(output.splitlines())


def test_no_run_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ddp train"):
        compare_runs([tmp_path])


def test_the_same_facts_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, record())
    write(tmp_path, 1, record(DP, speed=1500.0))
    write(tmp_path, 2, record(DDP, status="failed", weights_sha256=None, result={}))
    write(tmp_path, 3, record(experiment_sha256="f", experiment=OTHER, options=PLAIN))
    assert compare_runs([tmp_path], as_json=True) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["experiment"], first["identical"], first["verdict"][:8]) == ("mine", True, "digests:")
    assert first["runs"][1] == {
        "run": str(tmp_path / "run-1"),
        "layout": "dp-2-cpu",
        "simulated": True,
        "world_size": 2,
        "reduction": "exact",
        "ended_early": None,
        "status": "completed",
        "samples_per_second": 1500.0,
        "speed_up": 1.5,
        "accuracy": 0.9889,
        "figures": {"test_accuracy": 0.9889, "test_loss": 0.04321},
        "loss": 0.04321,
        "peak_memory_bytes": 300_000_000,
        "step_memory_bytes": 250_000_000,
        "data_wait": 0.031,
        "data": None,
        "weights_sha256": "a" * 64,
        "promise_broken": None,
        "guard": None,
    }
    assert [first["runs"][2][name] for name in ("status", "samples_per_second", "loss")] == ["failed", None, None]
    assert (second["experiment"], second["identical"]) == ("other", None)
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    named = {*first, *first["runs"][0]}
    assert named - set(re.findall(r"`(\w+)`", page)) == set(), "documented"

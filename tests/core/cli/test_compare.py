"""`ddp compare`: runs side by side, read from their records alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ddp_core.cli.compare import compare_runs, table, verdict
from ddp_core.cli.entry import main
from ddp_core.config.layout import Layout
from ddp_core.config.options import Options
from ddp_core.record.directory import RunDirectory
from tests.support.commands import ROOT
from tests.support.records import EXPERIMENT, a_record
from tests.support.wording import refusing, said_as_before

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


OWN = {"test_loss": 0.5, "test_right": 7, "test_mean_f1": 0.123456, "test_confusion": [[1]], "test_c": None}
NO_RESULT: dict[str, Any] = {"weights_sha256": None, "result": {}}
BROKEN = {"promise_broken": {"step": 3, "what": "other bits", "attempt": 0}}
WHOLE, SAMPLE, RANDOM = (
    {"data_sha256": digest, "data": {"digest_of": "", "parts": 0, "sampled": sampled}}
    for digest, sampled in (("1", False), ("1", True), (None, False))
)
TABLES = {
    "speed, quality, memory and digest": [record(), record(DP, 1500.0), record(DDP, 3000.0)],
    "the experiment's own figures": [
        record(result=OWN | {"test_c": 1.0, "test_d": 1.0, "test_e": 1.0}),
        record(DDP, result=OWN),
    ],
    "memory in steps of a sharded run": [
        record(result={"step_memory_bytes": 250_000_000}),
        record(Layout(kind="ddp", nproc_per_node=2, shard="optimizer")),
    ],
    "no speed-up without a single run": [record(DDP)],
    "no figure of quality": [record(result={"train_loss": 0.5})],
    # Nobody holds the lock of the directory of the second.
    "the status of what has no result": [record(status=status, **NO_RESULT) for status in ("failed", "running")],
    "a broken promise": [record(), record(DDP, **BROKEN)],
    "data digested as a whole": [record(**WHOLE), record(DDP, **WHOLE)],
    "data not digested as a whole": [record(**WHOLE), record(DDP, **SAMPLE), record(DDP, **RANDOM)],
}


@pytest.mark.parametrize("records", TABLES.values(), ids=TABLES)
def test_a_table_holds_what_the_runs_have(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    said_as_before(
        table([(write(tmp_path, number, content), content) for number, content in enumerate(records)], "mine")
    )


ELSEWHERE = {"fingerprint": {"threads": 2}}
VERDICTS = {
    "identical": [record(), record(DDP)],
    "one alone": [record()],
    "plain": [record(), record(DDP, options=PLAIN)],
    "failed": [record(), record(DDP, status="failed")],
    "one fingerprint": [record(), record(DDP, weights="b" * 64)],
    "other fingerprints": [record(), record(DDP, weights="b" * 64, **ELSEWHERE)],
    "other code and data": [
        record(),
        record(DDP, weights="b" * 64, source={"files": {"mine.py": "1"}}, data_sha256="2", **ELSEWHERE),
    ],
    "other initial weights": [record(), record(DDP, weights="b" * 64, init_from={"sha256": "3"})],
    "a broken promise leaves one": [record(), record(DDP, **BROKEN)],
    "a broken promise is no reference": [record(), record(DP), record(DDP, weights="b" * 64, **BROKEN)],
    "sampled data": [record(**SAMPLE), record(DDP, weights="b" * 64, **SAMPLE)],
    "random data": [record(**RANDOM), record(DDP, weights="b" * 64, **RANDOM)],
}


@pytest.mark.parametrize("records", VERDICTS.values(), ids=VERDICTS)
def test_the_verdict_says_what_explains_other_digests(records: list[dict[str, Any]]) -> None:
    said_as_before(verdict(records))


def test_other_weights_under_one_fingerprint_end_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    elsewhere = {"fingerprint": {"threads": 2}}
    write(tmp_path, 0, record())
    write(tmp_path, 1, record(DP, weights="b" * 64, **elsewhere))
    assert compare_runs([tmp_path]) == 0, "nothing is promised between these"
    write(tmp_path, 2, record(DDP, weights="c" * 64, **elsewhere))
    assert main(["compare", str(tmp_path)]) == 1, "the first run explains neither of the other two"
    assert "3 different ones under one fingerprint" in capsys.readouterr().out
    assert main(["compare", str(tmp_path), "--json"]) == 1
    assert (
        main(["compare", str(tmp_path), "--no-check"]) == main(["compare", str(tmp_path), "--no-check", "--json"]) == 0
    )


def test_a_place_without_runs_is_an_error_also_beside_others(tmp_path: Path) -> None:
    run = write(tmp_path, 0, record())
    with refusing():
        compare_runs([run.path, tmp_path / "missing"])


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


def test_the_same_facts_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, record())
    write(tmp_path, 1, record(DP, speed=1500.0))
    write(tmp_path, 2, record(DDP, status="failed", weights_sha256=None, result={}))
    write(tmp_path, 3, record(experiment_sha256="f", experiment=OTHER, options=PLAIN))
    assert compare_runs([tmp_path], as_json=True) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["experiment"], first["identical"], first["verdict"][:8]) == ("mine", True, "digests:")
    said_as_before(json.dumps(first["runs"][1]))
    assert [first["runs"][2][name] for name in ("status", "samples_per_second", "loss")] == ["failed", None, None]
    assert (second["experiment"], second["identical"]) == ("other", None)
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    named = {*first, *first["runs"][0]}
    assert named - set(re.findall(r"`(\w+)`", page)) == set(), "documented"

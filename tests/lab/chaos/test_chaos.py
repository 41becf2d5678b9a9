"""The chaos drill without a Docker engine: reading drills, judging made-up runs, and one kill of a local node."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ddp_core.config.layout import Layout
from ddp_lab.chaos import drill as drills
from ddp_lab.chaos.__main__ import main
from ddp_lab.chaos.drill import Planned, load, parse, plan
from ddp_lab.chaos.faults import action
from ddp_lab.chaos.judge import DrillReport, FaultReport, judge, table, two_writers
from ddp_lab.chaos.watch import Words, recovery
from tests.support.commands import command
from tests.support.records import a_record, an_attempt
from tests.support.wording import refusing, said_as_before

KILL: dict[str, object] = {"faults": [{"fault": "kill", "at_step": [10, 50]}, {"fault": "kill", "at_step": 90}]}


@pytest.mark.parametrize("name", drills.names())
def test_every_drill_that_comes_along_is_read_and_planned(name: str) -> None:
    drill = load(name)
    assert len(plan(drill, 0)) == len(drill.faults)
    assert drill.faults
    assert drill.about


def test_dice_depend_on_the_seed_alone() -> None:
    drill = parse(KILL)
    assert plan(drill, 3) == plan(drill, 3)
    assert len({str(plan(drill, seed)) for seed in range(20)}) > 10
    for seed in range(50):
        first, second = plan(drill, seed)
        assert first.at_step is not None
        assert 10 <= first.at_step <= 50
        assert second.at_step == 90
        assert first.node in ("node-1", "node-2", "node-3")
    assert {plan(drill, seed)[0].node for seed in range(50)} == {"node-1", "node-2", "node-3"}


@pytest.mark.parametrize(
    "fault",
    [
        {"fault": "explode", "at_step": 1},
        {"fault": "kill"},
        {"fault": "kill", "at_step": 1, "at_seconds": 1},
        {"fault": "kill", "at_step": [9, 1]},
        {"fault": "kill", "at_step": 1, "node": "node-4"},
        {"fault": "kill", "at_step": 1, "node": "me"},
        {"fault": "slow", "at_step": 1, "node": "rendezvous"},
        {"fault": "kill", "at_step": 1, "nod": "x"},
    ],
    ids=str,
)
def test_mistakes_in_a_drill_are_named(fault: dict[str, object]) -> None:
    with refusing():
        parse({"faults": [fault]})


@pytest.mark.parametrize("words", ["--drill standart", "--drill /nowhere.yaml", "--nodes 1"])
def test_mistakes_are_one_line_and_exit_2(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    said_as_before(capsys.readouterr().err)


def test_a_file_of_ones_own_is_a_drill(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("faults:\n  - {fault: pause, node: rank-0, at_seconds: 3, seconds: 2}\n")
    assert load(str(file)).name == "mine"
    assert plan(load(str(file)), 0) == [Planned("pause", "rank-0", 2, 2000, 0.2, None, 3)]


@pytest.mark.parametrize(
    ("kind", "node", "is_harmless"),
    [("kill", "node-2", False), ("kill", "rendezvous", True), ("stop", "node-2", False), ("pause", "node-2", False)],
)
def test_with_live_recovery_one_node_is_hurt_and_no_step_repeated(kind: str, node: str, is_harmless: bool) -> None:
    drill = parse({"recovery": "live", "faults": [{"fault": kind, "node": node, "at_step": 1}]})
    assert "--recovery live" in " ".join(drill.train_options())
    (fault,), cluster = plan(drill, 0), Mock()
    cluster.begin_and_end.return_value = Mock(), Mock()
    deed = action(fault, node, cluster, is_live=True)
    deed.end()
    assert (deed.harmless, deed.repeats) == (is_harmless, False)
    cluster.kill.assert_not_called()


def lines(*entries: tuple[str, int, float]) -> list[dict[str, Any]]:
    return [{"kind": kind, "step": step, "time": moment} for kind, step, moment in entries]


def test_recovery_is_the_first_step_of_the_next_attempt() -> None:
    records = lines(("step", 1, 1), ("step", 2, 2), ("step", 3, 3))
    assert recovery(records, 2.5) is None
    records += lines(("resume", 1, 9))
    assert recovery(records, 2.5) is None
    records += lines(("step", 2, 10), ("resume", 2, 20), ("step", 3, 21))
    found = recovery(records, 2.5)
    assert found is not None
    assert (found.resumed_seconds, found.steps_lost) == (7.5, 2)
    later = recovery(records, 11)
    assert later is not None
    assert (later.resumed_seconds, later.steps_lost) == (10, 0)


def test_the_victims_own_word_is_no_notice() -> None:
    words = Words()
    before = time.time() - 1
    words.hear("node-1", "ddp: rank 0 lost rank 1")
    assert words.first_notice(before, not_from="node-1") is None
    words.hear("node-2", "epoch 3")
    words.hear("node-2", "ddp: rank 1 (node 1) lost rank 0 (node 0)")
    notice = words.first_notice(before, not_from="node-1")
    assert notice is not None
    assert notice.node == "node-2"
    assert words.first_notice(time.time() + 1) is None


def on_nodes(count: int) -> dict[str, Any]:
    """An attempt on so many nodes."""
    return an_attempt(Layout(kind="ddp", nnodes=count))


def make_run(place: Path, steps: int = 4, digest: str = "a" * 64, **fields: Any) -> Path:
    """A completed run of two epochs on two ranks, whose second attempt repeated the last two steps of the first."""
    place.mkdir(parents=True)
    done = {"status": "completed", "launch_id": "launch", "weights_sha256": digest, "result": {"steps": steps}}
    record = a_record(attempts=[on_nodes(3), on_nodes(2)], **done | fields)
    (place / "run.json").write_text(json.dumps(record))
    metrics = lines(("step", 1, 1), ("step", 2, 2), ("step", 3, 3), ("resume", 1, 5))
    metrics += lines(*[("step", step, 5 + step) for step in range(2, steps + 1)])
    (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    return place


def judged(run: Path, undisturbed: Path, outcome: str = "recovered", left: list[str] | None = None) -> DrillReport:
    report = DrillReport("kill", "local processes", 1, [FaultReport("kill node-1", 3, 0.1, 4.0, 2, outcome)])
    report.left_behind = left or []
    judge(report, run, undisturbed)
    return report


@pytest.fixture
def undisturbed(tmp_path: Path) -> Path:
    return make_run(tmp_path / "undisturbed")


def test_a_drill_passes_only_with_the_same_weights(tmp_path: Path, undisturbed: Path) -> None:
    report = judged(make_run(tmp_path / "good"), undisturbed)
    assert (report.exit_code, report.identical) == (0, True)
    assert report.to_json()["format"] == "ddp-drill/1"
    assert {"name", "backend", "seed", "faults", "digest", "undisturbed_digest"} < report.to_json().keys()
    shown = table(report)
    assert "kill node-1" in shown
    assert "passed" in shown

    assert judged(make_run(tmp_path / "other", digest="b" * 64), undisturbed).exit_code == 1
    unfinished = make_run(tmp_path / "unfinished", status="failed", weights_sha256=None)
    assert judged(unfinished, undisturbed).exit_code != 0
    (unfinished / "run.json").write_text("[" * 100_000)
    report = judged(unfinished, undisturbed)
    assert report.exit_code != 0
    assert "no readable run.json (nested deeper" in report.remarks[-1]
    assert judged(make_run(tmp_path / "not"), undisturbed, outcome="not recovered").exit_code != 0
    assert judged(make_run(tmp_path / "left"), undisturbed, left=["container x"]).exit_code != 0


def test_a_new_rank_0_may_be_the_first_to_tell_of_the_step_that_it_goes_on_from(tmp_path: Path) -> None:
    told = [("step", 5), ("resume", 6), ("step", 6), ("step", 7)]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps({"kind": kind, "step": step, "time": 1}) + "\n" for kind, step in told))
    assert two_writers(tmp_path) is None
    with metrics.open("a") as file:
        file.write(json.dumps({"kind": "step", "step": 7, "time": 2}) + "\n")
    assert two_writers(tmp_path) == (7, 7)


def test_a_stale_writer_shows_in_the_metrics(tmp_path: Path, undisturbed: Path) -> None:
    run = make_run(tmp_path / "stale")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "step", "step": 4, "time": 99}) + "\n")
    report = judged(run, undisturbed)
    assert report.exit_code != 0
    assert "two writers" in table(report)


@pytest.mark.slow
def test_killed_local_node_comes_back_and_the_weights_are_the_undisturbed_ones(tmp_path: Path) -> None:
    file = tmp_path / "quick.yaml"
    file.write_text(
        "settings: [epochs=10]\nnodes: 2\ncheckpoint_every: 10\npaced: false\n"
        "faults:\n  - {fault: kill, node: rank-0, at_step: 30, seconds: 1}\n  - {fault: slow, at_step: 31}\n"
    )
    words = ["--drill", file, "--backend", "local", "--output", tmp_path / "outputs", "--seed", "1"]
    ended = command(*words, program=("-m", "ddp_lab.chaos"))
    assert ended.code == 0, ended.output + ended.errors
    assert "skipped: slow" in ended.output
    (report_file,) = (tmp_path / "outputs").glob("*/*/drill.json")
    report = json.loads(report_file.read_text())
    assert (report["identical"], report["exit_code"]) == (True, 0)
    assert [fault["outcome"] for fault in report["faults"]] == ["recovered"]
    assert report["left_behind"] == []
    assert "drill quick" in (report_file.parent / "log.txt").read_text()

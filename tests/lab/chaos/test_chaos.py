"""The chaos drill without a Docker engine: reading drills, judging made-up runs, and one kill of a local node."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_core.base.errors import UserError
from ddp_core.config.layout import Layout
from ddp_lab.chaos import drill as drills
from ddp_lab.chaos import mirror, shape
from ddp_lab.chaos.__main__ import main
from ddp_lab.chaos.drill import Planned, load, parse, plan
from ddp_lab.chaos.judge import DrillReport, FaultReport, judge, table, two_writers
from ddp_lab.chaos.processes import BreakableProcesses
from ddp_lab.chaos.runner import Runner
from ddp_lab.chaos.watch import Progress, Words, recovery
from ddp_lab.cluster.cluster import Spec
from ddp_lab.cluster.verdict import NodeResult
from tests.support.commands import command
from tests.support.records import a_record, an_attempt

KILL: dict[str, object] = {"faults": [{"fault": "kill", "at_step": [10, 50]}, {"fault": "kill", "at_step": 90}]}


@pytest.mark.parametrize("name", drills.names())
def test_every_drill_that_comes_along_is_read_and_planned(name: str) -> None:
    drill = load(name)
    assert len(plan(drill, 0)) == len(drill.faults)
    assert drill.faults
    assert drill.about


def test_standard_drill_holds_what_can_happen_to_a_cluster() -> None:
    kinds = [fault.fault for fault in load("standard").faults]
    assert kinds.count("kill") == 3
    assert {"pause", "partition", "disk-full", "down"} < set(kinds)
    assert any(fault.node == "rendezvous" for fault in load("standard").faults)
    assert all(fault.duration > load("standard").timeout for fault in load("standard").faults if fault.fault == "pause")


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
    ("fault", "expected"),
    [
        ({"fault": "explode", "at_step": 1}, "faults.0.fault"),
        ({"fault": "kill"}, "give at_step or at_seconds"),
        ({"fault": "kill", "at_step": 1, "at_seconds": 1}, "one of them"),
        ({"fault": "kill", "at_step": [9, 1]}, "low, high"),
        ({"fault": "kill", "at_step": 1, "node": "node-4"}, "there are 3 nodes"),
        ({"fault": "kill", "at_step": 1, "node": "me"}, "none of random"),
        ({"fault": "slow", "at_step": 1, "node": "rendezvous"}, "cannot be done to the rendezvous"),
        ({"fault": "kill", "at_step": 1, "nod": "x"}, "nod"),
    ],
)
def test_mistakes_in_a_drill_are_named(fault: dict[str, object], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        parse({"faults": [fault]})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--drill", "standart"], "did you mean standard"),
        (["--drill", "/nowhere.yaml"], "cannot read"),
        (["--nodes", "1"], "two nodes"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1


def test_a_file_of_ones_own_is_a_drill(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("faults:\n  - {fault: pause, node: rank-0, at_seconds: 3, seconds: 2}\n")
    assert load(str(file)).name == "mine"
    assert plan(load(str(file)), 0) == [Planned("pause", "rank-0", 2, 2000, 0.2, None, 3)]
    file.write_text("faults: [")
    with pytest.raises(UserError, match="not YAML"):
        load(str(file))


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
    assert two_writers(run) is None
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "step", "step": 4, "time": 99}) + "\n")
    report = judged(run, undisturbed)
    assert two_writers(run) == (4, 4)
    assert report.exit_code != 0
    assert "two writers" in table(report)


def test_progress_follows_a_growing_run(tmp_path: Path) -> None:
    progress = Progress(tmp_path, "launch")
    progress.look()
    assert (progress.path, progress.step, progress.trains) == (None, 0, False)
    run = make_run(tmp_path / "digits" / "run", status="running")
    progress.look()
    assert (progress.path, progress.step, progress.nnodes, progress.trains) == (run, 4, 2, True)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
        file.flush()
        progress.look()
        assert progress.step == 4
        file.write('ep": 5, "time": 30}\n')
        file.flush()
    progress.look()
    assert progress.step == 5
    assert progress.step_at(8) == 3
    record = json.loads((run / "run.json").read_text())
    record["attempts"].append(on_nodes(3))
    (run / "run.json").write_text(json.dumps(record))
    progress.look()
    assert progress.nnodes == 3
    assert not progress.trains


class Scripted:
    """A cluster whose run directory the test writes; it notes what is done to it."""

    name = "scripted"
    kinds = frozenset({"kill"})

    def __init__(self, run: Path, spec: Spec, then: Iterator[dict[str, Any]]) -> None:
        self.run, self.spec, self.then = run, spec, then
        self.codes: dict[str, int] = {}
        self.did: list[str] = []

    def start(self, spec: Spec) -> None:
        self.run.mkdir(parents=True)
        self.record(status="running", attempts=[on_nodes(3)])

    def record(self, **fields: Any) -> None:
        content = a_record(launch_id=self.spec.launch_id, **fields)
        (self.run / "run.json").write_text(json.dumps(content))

    def follow(self, write: object) -> None: ...

    def nodes(self) -> list[str]:
        return ["node-1", "node-2", "node-3"]

    def is_running(self, name: str) -> bool:
        return True

    def exit_codes(self) -> dict[str, int]:
        entry = next(self.then, None)
        if entry is None:
            self.record(status="completed", attempts=[on_nodes(3)] * 2)
            self.codes = dict.fromkeys(self.nodes(), 0)
        else:
            with (self.run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(entry | {"time": time.time()}) + "\n")
        return self.codes

    def kill(self, name: str) -> float:
        self.did.append(f"kill {name}")
        self.codes[name] = 137
        return time.time()

    def start_again(self, name: str) -> None:
        self.did.append(f"start {name}")
        self.codes.pop(name)
        self.record(status="running", attempts=[on_nodes(3)] * 2)
        steps = range(8, 20)
        self.then = iter([{"kind": "resume", "step": 7}, *[{"kind": "step", "step": step} for step in steps]])

    def settle(self) -> None: ...


def test_runner_strikes_at_the_step_and_starts_the_dead_node_again(tmp_path: Path) -> None:
    drill = parse(
        {"faults": [{"fault": "kill", "node": "node-2", "at_step": 5, "seconds": 1}, {"fault": "oom", "at_step": 6}]}
    )
    spec = Spec("digits", nnodes=3, output=tmp_path)
    endless = ({"kind": "step", "step": step} for step in range(1, 1000))
    cluster = Scripted(tmp_path / "digits" / "run", spec, endless)
    said: list[str] = []
    runner = Runner(drill, 0, cluster, spec, said.append, patience=20)  # type: ignore[arg-type]
    report = runner.run()
    assert cluster.did == ["kill node-2", "start node-2"]
    (fault,) = report.faults
    assert (fault.outcome, fault.name) == ("recovered", "kill node-2")
    assert fault.at_step is not None
    assert fault.at_step >= 5
    assert fault.steps_lost is not None
    (skipped,) = report.skipped
    assert skipped.startswith("oom")
    assert not report.remarks


def test_a_node_that_would_fail_again_ends_the_drill(tmp_path: Path) -> None:
    drill = parse(KILL)
    spec = Spec("digits", nnodes=3, output=tmp_path)
    cluster = Scripted(tmp_path / "digits" / "run", spec, iter([{"kind": "step", "step": 1}] * 1000))
    cluster.codes["node-3"] = 2
    report = Runner(drill, 0, cluster, spec, lambda line: None).run()  # type: ignore[arg-type]
    assert cluster.did == []
    assert "node-3 ended with 2" in report.remarks[0]


def test_local_processes_say_what_they_cannot_do() -> None:
    kinds = {fault.fault for name in drills.names() for fault in load(name).faults}
    assert kinds - BreakableProcesses.kinds == {"partition", "slow", "throttle", "disk-full", "oom"}


def test_mirror_copies_what_changed_and_no_checkpoints(tmp_path: Path) -> None:
    source, target = tmp_path / "small", tmp_path / "outputs"
    (source / "run" / "checkpoints").mkdir(parents=True)
    (source / "run" / "checkpoints" / "step.pt").write_text("big")
    (source / "run" / "metrics.jsonl").write_text("one\n")
    mirror.copy(source, target)
    assert (target / "run" / "metrics.jsonl").read_text() == "one\n"
    with (source / "run" / "metrics.jsonl").open("a") as file:
        file.write("two\n")
    mirror.main([str(source), str(target), "copy"])
    assert (target / "run" / "metrics.jsonl").read_text() == "one\ntwo\n"
    assert sorted(path.name for path in target.rglob("*") if path.is_file()) == ["metrics.jsonl"]


def test_shaping_is_asked_for_in_the_kernels_own_format() -> None:
    asked = shape.message(7, 8000)
    length, kind, flags, _, _ = struct.unpack_from("IHHII", asked)
    assert (length, kind, flags & shape._REPLACE) == (len(asked), 36, shape._REPLACE)
    assert struct.unpack_from("i", asked, 20) == (7,)
    assert b"tbf\0" in asked
    # The rate, in bytes per second, is in tc_ratespec, after the rtattr of the options and that of the parameters.
    (rate,) = struct.unpack_from("I", asked, 16 + 20 + 8 + 4 + 4 + 8)
    assert rate == 1_000_000
    undone = shape.message(7, 0)
    assert struct.unpack_from("H", undone, 4) == (37,)


def test_node_result_of_a_kill_is_no_mistake() -> None:
    assert NodeResult("node-1", 137).code == 6


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

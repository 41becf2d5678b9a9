"""The logic of the cluster command on scripted nodes, and a small real cluster of local processes."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.cli.prepare import load_with_settings
from ddp_core.config.layout import Layout
from ddp_core.record.directory import find_runs
from ddp_lab.cluster import __main__ as command
from ddp_lab.cluster.cluster import Spec, Write, wait_for
from ddp_lab.cluster.gpus import check_service
from ddp_lab.cluster.local import LocalBackend
from ddp_lab.cluster.published_run import beside_published
from ddp_lab.cluster.runs import Planned, find_baseline
from ddp_lab.cluster.verdict import NodeResult, Verdict, judge
from ddp_lab.probe.published import published
from tests.support.commands import ddp, train
from tests.support.processes import HANG
from tests.support.records import a_record
from tests.support.wording import refusing, said_as_before


def of(*codes: int) -> list[NodeResult]:
    return [NodeResult(f"node-{number}", code) for number, code in enumerate(codes, 1)]


@pytest.mark.parametrize(
    ("codes", "expected"),
    [((0, 0), 0), ((75, 75), 75), ((137, 6), 6), ((-9, 0), 6), ((143, 0), 6), ((9, 1, 6), 1), ((), 6)],
)
def test_a_node_that_was_killed_has_lost_its_peers(codes: tuple[int, ...], expected: int) -> None:
    assert judge(of(*codes)).exit_code == expected


@pytest.mark.parametrize(("codes", "expected"), [((6, 137), 4), ((0, 0), 0)])
def test_out_of_memory_beats_its_consequence_and_may_be_survived(codes: tuple[int, int], expected: int) -> None:
    verdict = judge([NodeResult("node-1", codes[0]), NodeResult("node-2", codes[1], out_of_memory=True)])
    assert verdict.exit_code == expected
    assert expected == 0 or "node-2 ran out of memory" in verdict.lines[1]


# A cause tells more than its consequence: a node that lost a peer, or was asked to stop, did so because of another.
TELLING = (5, 4, 3, 2, 70, 1, 6, 75, 0)


def test_of_two_nodes_the_more_telling_one_decides_whichever_comes_first() -> None:
    assert set(ExitCode) <= set(TELLING)
    for more, less in itertools.combinations(TELLING, 2):
        assert [judge(of(more, less)).exit_code, judge(of(less, more, less)).exit_code] == [more, more], (more, less)


class Scripted:
    """A backend whose nodes end as a script says: node name -> (number of the poll at which it ends, exit code)."""

    name = "scripted"

    def __init__(self, script: dict[str, tuple[int, int]], code_when_terminated: int = 75) -> None:
        self.script, self.code_when_terminated = script, code_when_terminated
        self.polls, self.terminated, self.stopped = 0, 0, 0

    def start(self, spec: Spec) -> None: ...

    def nodes(self) -> list[str]:
        return list(self.script)

    def follow(self, write: Write) -> None: ...

    def results(self) -> dict[str, NodeResult]:
        self.polls += 1
        return {name: NodeResult(name, code) for name, (poll, code) in self.script.items() if self.polls >= poll}

    def terminate(self) -> None:
        self.terminated += 1
        self.script = {
            name: (poll, code) if self.polls >= poll else (self.polls + 1, self.code_when_terminated)
            for name, (poll, code) in self.script.items()
        }

    def stop(self) -> None:
        self.stopped += 1


def test_asks_the_others_to_leave_once_patience_with_a_failure_is_over() -> None:
    backend = Scripted({"node-1": (1, 5), "node-2": (10**9, 0)})
    results = wait_for(backend, patience=0.05, poll=0.001)
    assert backend.terminated == 1
    assert judge(results).exit_code == 5


def test_ends_what_does_not_obey() -> None:
    class Deaf(Scripted):
        def terminate(self) -> None:
            self.terminated += 1

    backend = Deaf({"node-1": (10**9, 0)})
    results = wait_for(backend, patience=0.02, deadline=0.02, poll=0.001)
    assert (backend.terminated, backend.stopped) == (1, 1)
    assert judge(results).exit_code == 6


def test_stops_on_the_way_out_of_an_error() -> None:
    backend = Scripted({"node-1": (1, 0)})
    with pytest.raises(UserError), patch.object(backend, "start", side_effect=UserError("no")):
        command.launch(Spec("digits"), backend)
    assert backend.stopped == 1


def write_run(output: Path, name: str, **fields: Any) -> Path:
    directory = output / "digits" / name
    directory.mkdir(parents=True)
    record = a_record(**{"status": "completed", "experiment_sha256": "right", "started_at": name} | fields)
    (directory / "run.json").write_text(json.dumps(record))
    return directory


def test_baseline_is_the_newest_completed_single_cpu_run_of_the_same_experiment(tmp_path: Path) -> None:
    assert find_baseline(tmp_path, Planned("right", None)) is None
    write_run(tmp_path, "1")
    expected = write_run(tmp_path, "2")
    write_run(tmp_path, "3", status="failed")
    write_run(tmp_path, "4", experiment_sha256="other")
    write_run(tmp_path, "5", layout=Layout(kind="ddp"))
    write_run(tmp_path, "6", layout=Layout(device="cuda"))
    portable = [write_run(tmp_path, f"{6 + rules}", fingerprint={"numerics_rules": rules}) for rules in (1, 2)]
    assert find_baseline(tmp_path, Planned("right", None)) == expected
    assert [find_baseline(tmp_path, Planned("right", rules)) for rules in (1, 2, 3)] == [*portable, None]


def test_forced_backend_without_an_engine_is_a_resource_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent.sock")
    with pytest.raises(UserError) as raised:
        command.choose_backend("docker")
    assert raised.value.exit_code == 4


@pytest.mark.parametrize("arguments", [["up", "--nodes", "0"], ["up", "--experiment", "digitz"]], ids=" ".join)
def test_mistakes_are_one_line_and_exit_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(arguments) == 2
    said_as_before(capsys.readouterr().err)


def test_too_few_gpus_are_told_with_what_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_lab.cluster.containers.engine_version", lambda: "26")
    with refusing():
        check_service("ddp-4gpu", found=0)
    with refusing():
        check_service("dp-4gpu", found=2)
    check_service("ddp-4gpu", found=4)
    check_service("ddp-cpu", found=0)
    with refusing():
        check_service("ddp-3gpu", found=3)


def test_auto_takes_local_processes_without_an_engine_or_its_sdk_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent.sock")
    assert command.choose_backend("auto").name == "local processes"
    assert capsys.readouterr().out.startswith("cluster: local processes (")
    monkeypatch.setattr("ddp_core.base.extras.find_spec", lambda _: None)
    assert command.choose_backend("auto").name == "local processes"
    said = "cluster: local processes (a cluster of containers needs docker: pip install 'samebits[cluster]')\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize("name", ["digits", "toy_mlp"])
def test_a_run_is_set_beside_what_is_published_of_its_experiment(name: str) -> None:
    table = published()
    record = {
        "experiment": {"name": name},
        "experiment_sha256": command.plan(name, ["--nproc-per-node", "2"]).digest,
        "options": {"reduction": "exact"},
        "weights_sha256": table.runs[name],
        "fingerprint": {"torch": table.torch, "numerics_rules": table.rules},
    }
    assert beside_published(record, table) == (
        True,
        f"these are the published weights of {name}, designed for every x86-64 CPU with AVX2",
    )
    beside = beside_published(record | {"weights_sha256": "other"}, table)
    assert beside is not None
    assert not beside.is_same
    assert beside.line.startswith(f"NOT the published weights of {name}")
    assert beside.line.endswith("…): `ddp probe` says what differs here")
    beside = beside_published(
        record | {"weights_sha256": "other", "fingerprint": record["fingerprint"] | {"torch": "1.0"}}, table
    )
    assert beside is not None
    assert f"made with torch {table.torch}, and this is 1.0;" in beside.line
    for other in (
        {"experiment": {"name": "mine"}},
        {"experiment_sha256": "with other settings"},
        {"fingerprint": {"torch": table.torch}},
        {"fingerprint": {"torch": table.torch, "numerics_rules": 1}},
        {"options": {"reduction": "plain"}},
    ):
        assert beside_published(record | other, table) is None


@pytest.mark.parametrize(
    ("single", "cluster", "options", "code"),
    [
        ("published", "published", (), 0),
        ("published", "b" * 64, (), 1),
        ("b" * 64, "b" * 64, (), 1),
        ("b" * 64, "c" * 64, ("--no-check",), 0),
        ("published", None, (), 2),
    ],
    ids=["the published weights", "other weights", "the same, but unpublished", "unchecked", "no run"],
)
def test_a_cluster_with_other_weights_than_promised_ends_with_1(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    single: str,
    cluster: str | None,
    options: tuple[str, ...],
    code: int,
) -> None:
    table, digest = published(), command.plan("toy_mlp", []).digest

    def write(name: str, weights: str, **fields: Any) -> None:
        weights = table.runs["toy_mlp"] if weights == "published" else weights
        shipped = load_with_settings("toy_mlp", []).experiment
        fingerprint = {"torch": table.torch, "numerics_rules": table.rules}
        fields |= {"experiment": shipped, "experiment_sha256": digest, "fingerprint": fingerprint}
        write_run(tmp_path, name, weights_sha256=weights, **fields)

    def launched(spec: Spec, backend: object) -> Verdict:
        if cluster is not None:
            write("2", cluster, layout=Layout(kind="ddp", nproc_per_node=2), launch_id=spec.launch_id)
        return Verdict(0, ())

    write("1", single)
    monkeypatch.setattr(command, "launch", launched)
    words = ["up", "--backend", "local", "--experiment", "toy_mlp", "--output", str(tmp_path), *options]
    assert command.main(words) == code


def test_two_local_nodes_train_and_are_compared_with_the_baseline_that_is_there(tmp_path: Path) -> None:
    train(tmp_path, "toy_mlp")
    words = ("up", "--backend", "local", "--nproc", "1", "--experiment", "toy_mlp", "--output", tmp_path)
    ended = ddp(*words, module="ddp_lab.cluster.__main__")
    assert ended.code == 0, ended.output + ended.errors
    assert "cluster: node-1 exited with 0" in ended.output
    assert "cluster: node-2 exited with 0" in ended.output
    records = [record for _, record in find_runs(tmp_path)]
    assert sorted(record["layout"]["label"] for record in records) == ["ddp-2x1-cpu", "single-cpu"]
    assert len({record["weights_sha256"] for record in records}) == 1
    assert "ddp-2x1-cpu" in ended.output.rpartition("cluster: node-2")[2]


@pytest.mark.slow
def test_local_nodes_save_when_asked_to_leave(tmp_path: Path) -> None:
    spec = Spec("digits", "ddp", 1, 2, ("--set", "epochs=10000"), output=tmp_path)
    training = threading.Event()

    def watch(node: str, line: str) -> None:
        if "epoch" in line:
            training.set()

    backend = LocalBackend()
    try:
        backend.start(spec)
        backend.follow(watch)
        assert training.wait(HANG)
        backend.terminate()
        assert judge(wait_for(backend, patience=HANG, deadline=HANG)).exit_code == 75
    finally:
        backend.stop()
    (record,) = tmp_path.glob("*/*/run.json")
    assert json.loads(record.read_text())["status"] == "stopped"

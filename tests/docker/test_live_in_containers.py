"""Live recovery in containers: nodes are lost, leave and come, and the rendezvous too, while the others train on."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from ddp_core.observe.metrics import read_metrics
from ddp_lab.chaos.drill import RENDEZVOUS
from ddp_lab.cluster.cluster import Spec, wait_for
from ddp_lab.cluster.containers import ContainerBackend
from tests.docker.nodes import Nodes, Start, run_drill
from tests.support.commands import trained

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

EPOCHS = 24


@pytest.fixture(scope="module")
def digest(image: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the weights after so many epochs in one process."""
    place = tmp_path_factory.mktemp("undisturbed")
    options = ("--set", f"epochs={EPOCHS}", "--reduction", "exact")
    backend = ContainerBackend()
    try:
        backend.start(Spec("digits", "single", options=options, output=place, data=place))
        (ended,) = wait_for(backend, deadline=200)
    finally:
        backend.stop()
    assert ended.exit_code == 0
    return str(trained(place)[1]["weights_sha256"])


def says(nodes: Nodes, words: str, count: int = 1) -> bool:
    return nodes.said().count(words) >= count


def check_live(nodes: Nodes, digest: str) -> None:
    """Check that the run has ended as if nothing had happened, with no step done twice."""
    nodes.until(lambda: nodes.progress.completed)
    assert nodes.progress.record["weights_sha256"] == digest, nodes.said()[-5000:]
    assert nodes.progress.path is not None
    steps = [each["step"] for each in read_metrics(nodes.progress.path / "metrics.jsonl") if each["kind"] == "step"]
    assert len(steps) == len(set(steps))
    told = [each for each in nodes.progress.records if each["kind"] in ("step", "resume")]
    for before, after in itertools.pairwise(told):
        # The step whose state has died with rank 0 may be computed again.
        assert after["kind"] == "step" or after["step"] >= before["step"] - 1, "more than that was done again"
    assert "start again" not in nodes.said()


@pytest.mark.slow
def test_nodes_leave_come_and_are_lost_and_the_rendezvous_is_started_again(start: Start, digest: str) -> None:
    nodes = start({"nodes": 2, "recovery": "live", "paced": True, "timeout": 20}, "--nnodes", "1:4", epochs=EPOCHS)
    nodes.at_step(20)
    nodes.until(lambda: nodes.progress.nnodes == 2)
    first = nodes.of_rank_0()
    (other,) = set(nodes.cluster.nodes()) - {first}
    stays = nodes.workers(other)
    assert len(stays) == 1
    nodes.cluster.scale(3)
    (new,) = set(nodes.cluster.nodes()) - {first, other}
    nodes.until(lambda: says(nodes, "3 ranks go on"))
    nodes.cluster.kill(first)
    nodes.until(lambda: says(nodes, "rank 0 lost after step"))
    nodes.cluster.container(RENDEZVOUS).restart(timeout=5)
    nodes.until(lambda: says(nodes, "the rendezvous is back", count=2))
    nodes.cluster.start_again(first)
    nodes.until(lambda: says(nodes, "3 ranks go on", count=2))
    nodes.cluster.stop_one(new)
    assert nodes.cluster.exit_codes()[new] == 75
    nodes.until(lambda: says(nodes, "left after step"))
    assert nodes.workers(other) == stays
    nodes.until(lambda: {other, first} <= nodes.cluster.exit_codes().keys(), 300)
    assert [nodes.cluster.exit_codes()[name] for name in (first, other)] == [0, 0]
    check_live(nodes, digest)


@pytest.mark.slow
def test_a_node_without_a_network_is_left_out_and_comes_back(start: Start, digest: str) -> None:
    nodes = start({"nodes": 3, "recovery": "live", "paced": True, "timeout": 20}, epochs=EPOCHS)
    nodes.at_step(20)
    nodes.until(lambda: nodes.progress.nnodes == 3)
    victim = nodes.of_rank_0()
    others = set(nodes.cluster.nodes()) - {victim}
    stay = {name: nodes.workers(name) for name in others}
    nodes.cluster.cut_off(victim)
    nodes.until(lambda: says(nodes, "2 ranks go on"))
    nodes.until(lambda: any(said.node == victim and "trying again" in said.line for said in nodes.words.since(0)))
    nodes.cluster.reconnect(victim)
    nodes.until(lambda: says(nodes, "3 ranks go on"))
    assert {name: nodes.workers(name) for name in others} == stay
    assert nodes.verdict().exit_code == 0
    check_live(nodes, digest)


@pytest.mark.slow
def test_the_machine_of_the_rendezvous_has_no_network_for_a_while(start: Start, digest: str) -> None:
    nodes = start({"nodes": 2, "recovery": "live", "paced": True, "timeout": 20}, epochs=EPOCHS)
    nodes.at_step(20)
    nodes.until(lambda: nodes.progress.nnodes == 2)
    stay = {name: nodes.workers(name) for name in nodes.cluster.nodes()}
    nodes.cluster.cut_off(RENDEZVOUS)
    nodes.until(lambda: says(nodes, "train on without it", count=2))
    nodes.at_step(nodes.progress.step + 20)
    nodes.cluster.reconnect(RENDEZVOUS)
    nodes.until(lambda: says(nodes, "the rendezvous is back", count=2))
    assert {name: nodes.workers(name) for name in nodes.cluster.nodes()} == stay
    nodes.cluster.container("node-1").kill(signal="TERM")
    nodes.until(lambda: says(nodes, "left after step"))
    nodes.until(nodes.ended)
    assert sorted(nodes.cluster.exit_codes().values()) == [0, 75]
    check_live(nodes, digest)


@pytest.mark.slow
def test_a_drill_with_live_recovery_loses_no_step(image: str, tmp_path: Path) -> None:
    report, _ = run_drill(
        tmp_path,
        """
        settings: [epochs=40]
        recovery: live
        timeout: 15
        faults:
          - {fault: kill, node: rank-0, at_step: 30, seconds: 8}
          - {fault: kill, node: rendezvous, at_step: 90}
          - {fault: stop, node: random, at_step: 150}
          - {fault: pause, node: rank-0, at_step: 250, seconds: 15}
          - {fault: partition, node: random, at_step: 400, seconds: 20}
        """,
    )
    assert [fault["outcome"] for fault in report["faults"]] == ["recovered"] * 5
    assert (report["identical"], report["remarks"]) == (True, [])

"""Live recovery in containers: the scenarios that name them, and a drill."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_lab.cluster.cluster import Spec, wait_for
from ddp_lab.cluster.containers import ContainerBackend
from tests.docker.nodes import Containers, Start, run_drill
from tests.faults.scenarios import Scenario, check, on, play
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


@pytest.mark.slow
@pytest.mark.parametrize("scenario", on("containers"))
def test_what_must_follow_does(start: Start, digest: str, scenario: Scenario) -> None:
    settings = {"nodes": scenario.nodes, "recovery": "live", "paced": True, "timeout": 20}
    allowed = scenario.allowed or f"{scenario.nodes}:{scenario.nodes}"
    place = Containers(start(settings, "--nnodes", allowed, epochs=EPOCHS))
    play(scenario, place)
    check(scenario, place.output, digest, *place.end())


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

"""Live recovery in containers: the scenarios that name them, and a drill."""

from __future__ import annotations

import pytest

from ddp_lab.cluster.cluster import Spec, wait_for
from ddp_lab.cluster.containers import ContainerBackend
from tests.docker.nodes import Containers, Start
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

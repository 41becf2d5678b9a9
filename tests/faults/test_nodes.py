"""Nodes of real processes: every scenario of nodes that are lost, leave and come, and of a lost rendezvous."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.launches import HURRY, Processes, Watch, nodes, undisturbed
from tests.faults.matrix import AGAIN, LATE, NOTICED, record_row
from tests.faults.scenarios import Scenario, Times, check, on, play
from tests.support.commands import trained

EPOCHS = {"live": 15, "restart": 60}
PAUSE = {"live": 0.04, "restart": 0.006}


def words_of(scenario: Scenario) -> list[str]:
    length = ["--set", f"epochs={EPOCHS[scenario.recovery]}"]
    in_time = ["--timeout", "20"] if scenario.recovery == "live" else []
    return [*length, "--recovery", scenario.recovery, *in_time, *scenario.words]


@pytest.fixture(scope="module")
def digest_after(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """The digest of the weights after so many epochs, by one process."""
    return functools.cache(
        lambda epochs: undisturbed(tmp_path_factory.mktemp("undisturbed"), "--set", f"epochs={epochs}")
    )


@pytest.mark.full
@pytest.mark.parametrize("scenario", [each for each in on("processes") if not each.values[0].kills])
def test_what_must_follow_does(tmp_path: Path, digest_after: Callable[[int], str], scenario: Scenario) -> None:
    allowed = scenario.allowed or f"{scenario.nodes}:{scenario.nodes}"
    words, pause = words_of(scenario), PAUSE[scenario.recovery]
    with nodes(scenario.nodes, tmp_path, *words, pause=pause, ranks=scenario.ranks, allowed=allowed) as started:
        place = Processes(tmp_path, *started)
        times = play(scenario, place)
        if scenario.recovery == "live":
            (tmp_path / HURRY).touch()
        place.end()
        always = ["".join(launch.said()) for launch in place.always]
        check(scenario, tmp_path, digest_after(EPOCHS[scenario.recovery]), list(place.said().values()), always)
    if scenario.row:
        record(scenario, times)


def record(scenario: Scenario, times: list[Times]) -> None:
    """Record the row of the fault matrix that the scenario is one of."""
    noticed = max((each.noticed for each in times), default=0.0)
    worst = max((each.again for each in times), default=0.0)
    limits = {AGAIN: worst} if worst else {}
    if noticed and scenario.row == 5:
        noticed -= float(scenario.words[scenario.words.index("--timeout") + 1])
        limits[LATE] = noticed
    elif noticed:
        limits[NOTICED] = noticed
    said = [f"noticed after {noticed:.1f} s"] if noticed else []
    said += [f"trains again after {worst:.1f} s at most"] if worst else []
    record_row(scenario.row, "; ".join([scenario.name, *said, "same weights"]), limits)


@pytest.mark.slow
def test_a_rendezvous_that_stays_away_ends_in_6(tmp_path: Path) -> None:
    words = ("--set", "epochs=60", "--recovery", "restart", "--max-restarts", "0")
    with nodes(2, tmp_path, *words, pause=PAUSE["restart"]) as (launches, _, store):
        Watch(tmp_path).wait_for_step(10)
        started = time.monotonic()
        store.kill()
        ended = [launch.end() for launch in launches]
        seconds = time.monotonic() - started
    assert [end.code for end in ended] == [6, 6]
    assert all("start `ddp rendezvous --port PORT` there" in end.errors for end in ended)
    directory, record = trained(tmp_path)
    assert record["status"] in ("stopped", "failed")
    assert not directory.is_worked_in
    record_row(3, "with no restarts allowed: 6, saying what to start", {"all nodes gone": seconds})


@pytest.mark.slow
@pytest.mark.parametrize("recovery", ["live", "restart"])
def test_an_exception_on_one_node_ends_both(tmp_path: Path, recovery: str) -> None:
    words = ("--recovery", recovery, "--fault", "raise@13:1")
    with nodes(2, tmp_path, *words, pause=PAUSE[recovery], allowed="2:2") as (launches, _, _):
        ended = sorted((launch.end() for launch in launches), key=lambda end: end.code)
    assert [end.code for end in ended] == [2, 6], [end.errors for end in ended]
    assert ended[0].errors.endswith("ddp: error: rank 1 (node 1): RuntimeError: scripted fault raise@13:1\n")
    assert ended[1].errors.endswith("another node has ended this launch; its own message says why\n")
    assert "Traceback" not in ended[0].errors + ended[1].errors, "no frame of it is the user's"
    record_row(15, f"on two nodes, {recovery}: 2 and the error on its own, 6 on the other, which says so")

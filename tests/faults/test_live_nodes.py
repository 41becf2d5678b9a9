"""Nodes are lost, leave and come, and the others go on: same weights, same processes, no step done again."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from ddp_core.checkpoint import find_checkpoints
from ddp_core.observe.metrics import read_metrics
from tests.faults.launches import STEPS_PER_EPOCH, Launch, Store, Watch, check_aftermath, nodes, to_the_end, undisturbed
from tests.support.commands import Ended, trained, wait_until
from tests.support.processes import HANG

EPOCHS = 15
STEPS = EPOCHS * STEPS_PER_EPOCH
LENGTH = ["--set", f"epochs={EPOCHS}"]
LIVE = [*LENGTH, "--recovery", "live", "--timeout", "20"]
PAUSE = 0.04


@pytest.fixture(scope="module")
def digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the weights after the training of these tests, by one process."""
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), *LENGTH)


def live_nodes(
    count: int, output: Path, *words: str, ranks: int = 1, most: int | None = None
) -> AbstractContextManager[tuple[list[Launch], Callable[[], Launch], Store]]:
    """`nodes`, all of which have come when training begins; `most` may come later."""
    return nodes(count, output, *words, pause=PAUSE, ranks=ranks, allowed=f"{count}:{most or count}")


def node_of(rank: int, launches: Sequence[Launch]) -> Launch:
    return next(launch for launch in launches if rank in launch.workers())


def pids(launches: Sequence[Launch]) -> set[int]:
    return {process.pid for launch in launches for process in launch.workers().values()}


def wait_for_words(launches: Sequence[Launch], words: str) -> None:
    wait_until(lambda: any(words in launch.output() for launch in launches), HANG, words)


def check_done(output: Path, ended: Sequence[Ended], digest: str) -> dict[str, Any]:
    """Check that all have come to the end, with every sample trained once; returns the run's record."""
    assert {end.code for end in ended} == {0}, [end.errors for end in ended]
    return check_aftermath(output, digest, STEPS)


def check_live(output: Path, ended: Sequence[Ended], digest: str) -> dict[str, Any]:
    """Check that the run has ended as if nothing had happened, with no step done twice; returns its record."""
    record = check_done(output, ended, digest)
    for end in ended:
        assert "Traceback" not in end.errors
        assert "start again" not in end.errors
        assert "resumed at step" not in end.output
    directory, _ = trained(output)
    steps = [each["step"] for each in read_metrics(directory.metrics) if each["kind"] == "step"]
    assert len(steps) == len(set(steps))
    told = 0
    for each in map(json.loads, directory.metrics.read_text().splitlines()):
        if each["kind"] == "resume":
            # The step whose state has died with rank 0 may be computed again.
            assert each["step"] >= told - 1, "more than that was done again"
        told = each["step"] if each["kind"] == "step" else told
    return record


@pytest.mark.full
@pytest.mark.parametrize("rank", [pytest.param(0), pytest.param(2, marks=pytest.mark.slow)])
def test_a_node_is_lost(tmp_path: Path, digest: str, rank: int) -> None:
    watch = Watch(tmp_path)
    with live_nodes(3, tmp_path, *LIVE) as (launches, _, _):
        watch.wait_for_step(10)
        victim = node_of(rank, launches)
        others = [launch for launch in launches if launch is not victim]
        before = pids(others)
        victim.kill()
        wait_for_words(others, "2 ranks go on")
        assert pids(others) == before
        ended = to_the_end(tmp_path, others)
    record = check_live(tmp_path, ended, digest)
    assert [attempt["layout"]["nnodes"] for attempt in record["attempts"]] == [3, 2]
    for end in ended:
        assert f"node {rank} (rank {rank}) is lost: its launcher has ended; the others go on" in end.errors


@pytest.mark.slow
@pytest.mark.parametrize("lost", [(0, 1), (1, 2)])
def test_two_nodes_are_lost_at_once(tmp_path: Path, digest: str, lost: tuple[int, int]) -> None:
    watch = Watch(tmp_path)
    with live_nodes(3, tmp_path, *LIVE) as (launches, _, _):
        watch.wait_for_step(10)
        victims = [node_of(rank, launches) for rank in lost]
        (other,) = (launch for launch in launches if launch not in victims)
        before = pids([other])
        for victim in victims:
            victim.kill()
        wait_for_words([other], "1 rank goes on")
        assert pids([other]) == before
        ended = to_the_end(tmp_path, [other])
    check_live(tmp_path, ended, digest)


@pytest.mark.full
def test_a_worker_of_one_of_two_nodes_is_lost(tmp_path: Path, digest: str) -> None:
    watch = Watch(tmp_path)
    with live_nodes(2, tmp_path, *LIVE, ranks=2) as (launches, _, _):
        watch.wait_for_step(10)
        before = pids(launches)
        victim = node_of(0, launches).workers()[0]
        victim.kill()
        wait_until(lambda: sum(each.output().count("4 ranks go on") for each in launches) == 1, HANG, "one has joined")
        assert len(before & pids(launches)) == 3
        ended = to_the_end(tmp_path, launches)
    record = check_live(tmp_path, ended, digest)
    shapes = [(each["layout"]["nnodes"], each["layout"]["nproc_per_node"]) for each in record["attempts"]]
    # Where the nodes have unlike numbers of ranks, each rank counts as a node.
    assert shapes == [(2, 2), (3, 1), (2, 2)]


@pytest.mark.full
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_node_that_is_asked_to_leave_hands_over(tmp_path: Path, digest: str, rank: int) -> None:
    watch = Watch(tmp_path)
    with live_nodes(3, tmp_path, *LIVE) as (launches, _, _):
        watch.wait_for_step(10)
        leaver = node_of(rank, launches)
        others = [launch for launch in launches if launch is not leaver]
        before = pids(others)
        leaver.signal(signal.SIGTERM)
        left = leaver.wait()
        wait_for_words(others, "2 ranks go on")
        assert pids(others) == before
        ended = to_the_end(tmp_path, others)
    assert left.code == 75, left.errors
    assert "this node has left the others, who go on (SIGTERM)" in left.errors
    record = check_live(tmp_path, ended, digest)
    assert [attempt["layout"]["nnodes"] for attempt in record["attempts"]] == [3, 2]
    for end in ended:
        assert f"node {rank} (rank {rank}) has left, as it was asked to; the others go on" in end.errors
    assert f"rank {rank} left after step" in ended[0].output + ended[1].output


@pytest.mark.slow
def test_all_nodes_are_asked_to_leave_and_stop_together(tmp_path: Path, digest: str) -> None:
    watch = Watch(tmp_path)
    with live_nodes(2, tmp_path, *LIVE) as (launches, start, _):
        watch.wait_for_step(10)
        for launch in launches:
            launch.signal(signal.SIGTERM)
        assert [launch.wait().code for launch in launches] == [75, 75]
        directory, record = trained(tmp_path)
        assert record["status"] == "stopped"
        assert find_checkpoints(directory.checkpoints)[0].step == watch.step()
        again = [start(), start()]
        ended = to_the_end(tmp_path, again)
    check_done(tmp_path, ended, digest)


@pytest.mark.full
def test_a_node_comes(tmp_path: Path, digest: str) -> None:
    watch = Watch(tmp_path)
    with live_nodes(2, tmp_path, *LIVE, most=3) as (launches, start, _):
        watch.wait_for_step(10)
        before = pids(launches)
        late = start()
        wait_for_words(launches, "3 ranks go on")
        assert pids(launches) == before
        assert len(late.workers()) == 1
        ended = to_the_end(tmp_path, (*launches, late))
    record = check_live(tmp_path, ended, digest)
    assert [attempt["layout"]["nnodes"] for attempt in record["attempts"]] == [2, 3]


@pytest.mark.slow
def test_a_node_comes_to_a_single_one_which_is_lost_then(tmp_path: Path, digest: str) -> None:
    watch = Watch(tmp_path)
    with live_nodes(1, tmp_path, *LIVE, most=2) as ((first,), start, _):
        watch.wait_for_step(10)
        late = start()
        wait_for_words([first], "2 ranks go on")
        before = pids([late])
        first.kill()
        wait_for_words([late], "1 rank goes on")
        assert pids([late]) == before
        ended = to_the_end(tmp_path, [late])
    check_live(tmp_path, ended, digest)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("comes_first", [True, False])
def test_a_node_is_lost_and_another_one_comes(tmp_path: Path, digest: str, rank: int, comes_first: bool) -> None:
    watch = Watch(tmp_path)
    with live_nodes(2, tmp_path, *LIVE, most=3 if comes_first else 2) as (launches, start, _):
        watch.wait_for_step(10)
        victim = node_of(rank, launches)
        (other,) = (launch for launch in launches if launch is not victim)
        before = pids([other])
        if comes_first:
            late = start()
            wait_until(late.workers, HANG, "the new node has a worker")
            victim.kill()
        else:
            victim.kill()
            late = start()
        wait_until(lambda: sum("2 ranks go on" in each.output() for each in (other, late)), HANG, "two ranks")
        assert pids([other]) == before
        ended = to_the_end(tmp_path, (other, late))
    check_live(tmp_path, ended, digest)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_a_stopped_node_is_taken_for_lost_and_joins_again(tmp_path: Path, digest: str, rank: int) -> None:
    watch = Watch(tmp_path)
    words = [*LENGTH, "--recovery", "live", "--timeout", "4"]
    with live_nodes(3, tmp_path, *words) as (launches, _, _):
        watch.wait_for_step(10)
        victim = node_of(rank, launches)
        others = [launch for launch in launches if launch is not victim]
        before = pids(others)
        victim.signal_all(signal.SIGSTOP)
        wait_for_words(others, "2 ranks go on")
        victim.signal_all(signal.SIGCONT)
        wait_for_words(others, "3 ranks go on")
        assert pids(others) == before
        ended = to_the_end(tmp_path, (*others, victim))
    check_live(tmp_path, ended, digest)
    assert f"node {rank} (rank {rank}) is lost: nothing comes from it" in ended[0].errors + ended[1].errors


@pytest.mark.slow
def test_nodes_come_while_the_first_ones_begin(tmp_path: Path, digest: str) -> None:
    with nodes(3, tmp_path, *LIVE, pause=PAUSE) as (launches, _, _):
        ended = [launch.wait() for launch in launches]
    check_done(tmp_path, ended, digest)


@pytest.mark.slow
def test_no_rank_is_left_and_all_start_again(tmp_path: Path, digest: str) -> None:
    watch = Watch(tmp_path)
    with live_nodes(2, tmp_path, *LIVE) as (launches, _, _):
        watch.wait_for_step(10)
        for process in [process for launch in launches for process in launch.workers().values()]:
            process.kill()
        ended = to_the_end(tmp_path, launches)
    check_done(tmp_path, ended, digest)


@pytest.mark.slow
def test_an_exception_on_one_node_ends_both(tmp_path: Path) -> None:
    with live_nodes(2, tmp_path, *LIVE, "--fault", "raise@13:1") as (launches, _, _):
        ended = sorted((launch.wait() for launch in launches), key=lambda end: end.code)
    assert [end.code for end in ended] == [2, 6], [end.errors for end in ended]
    assert ended[0].errors.endswith("ddp: error: rank 1 (node 1): RuntimeError: scripted fault raise@13:1\n")
    assert ended[1].errors.endswith("another node has ended this launch; its own message says why\n")


def lose(store: Store, launches: Sequence[Launch]) -> None:
    """End the rendezvous, and wait until all know it."""
    store.kill()
    wait_until(lambda: all("train on without it" in launch.errors() for launch in launches), HANG, "the loss is seen")


@pytest.mark.full
def test_without_the_rendezvous_the_ranks_train_on_and_it_comes_back(tmp_path: Path, digest: str) -> None:
    watch = Watch(tmp_path)
    with live_nodes(2, tmp_path, *LIVE, most=3) as (launches, start, store):
        watch.wait_for_step(10)
        before = pids(launches)
        lose(store, launches)
        watch.wait_for_step(watch.step() + 10)
        store.start()
        wait_until(lambda: all("rendezvous is back" in launch.errors() for launch in launches), HANG, "it is back")
        late = start()
        wait_for_words(launches, "3 ranks go on")
        assert pids(launches) == before
        lost = node_of(1, launches)
        others = [launch for launch in launches if launch is not lost]
        lost.kill()
        wait_for_words(others, "2 ranks go on")
        ended = to_the_end(tmp_path, (*others, late))
    check_live(tmp_path, ended, digest)


@pytest.mark.slow
def test_the_rendezvous_is_lost_for_good(tmp_path: Path, digest: str) -> None:
    watch = Watch(tmp_path)
    with live_nodes(2, tmp_path, *LIVE) as (launches, _, store):
        watch.wait_for_step(10)
        lose(store, launches)
        ended = to_the_end(tmp_path, launches)
    check_live(tmp_path, ended, digest)


@pytest.mark.slow
@pytest.mark.parametrize("is_node", [True, False])
def test_a_loss_without_the_rendezvous_lets_all_start_again(tmp_path: Path, digest: str, is_node: bool) -> None:
    watch = Watch(tmp_path)
    words = [*LENGTH, "--recovery", "live", "--timeout", "5"]
    with live_nodes(2, tmp_path, *words, ranks=2) as (launches, start, store):
        watch.wait_for_step(10)
        lose(store, launches)
        victim = node_of(2, launches)
        if is_node:
            victim.kill()
        else:
            victim.workers()[2].kill()
        left = [launch for launch in launches if launch is not victim or not is_node]
        wait_until(lambda: all("trying again" in launch.errors() for launch in left), HANG, "all start again")
        store.start()
        ended = to_the_end(tmp_path, (*left, *([start()] if is_node else [])))
    check_done(tmp_path, ended, digest)


@pytest.mark.slow
def test_all_stop_when_one_node_is_asked_to_leave_without_the_rendezvous(tmp_path: Path, digest: str) -> None:
    watch = Watch(tmp_path)
    with live_nodes(2, tmp_path, *LIVE) as (launches, start, store):
        watch.wait_for_step(10)
        lose(store, launches)
        launches[0].signal(signal.SIGTERM)
        assert [launch.wait().code for launch in launches] == [75, 75]
        store.start()
        ended = to_the_end(tmp_path, (start(), start()))
    check_done(tmp_path, ended, digest)

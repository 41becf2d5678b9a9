"""Nodes that die, stop and come back, and a lost rendezvous, with --recovery restart: one launch per node."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from ddp_core.checkpoint import find_checkpoints
from ddp_core.config.layout import SHARD_MODES, ShardMode
from ddp_core.observe.metrics import read_metrics
from tests.faults.launches import STEPS_PER_EPOCH, Launch, Watch, check_aftermath, nodes, now, undisturbed
from tests.faults.matrix import AGAIN, LATE, NOTICED, record_row
from tests.support.commands import trained, wait_until
from tests.support.processes import HANG

pytestmark = pytest.mark.slow
EPOCHS = 60
LENGTH = ["--set", f"epochs={EPOCHS}", "--recovery", "restart"]
PAUSE = 0.006


@pytest.fixture(scope="module")
def digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the weights after the longer training that these tests need."""
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), *LENGTH)


def node_of(rank: int, launches: list[Launch]) -> Launch:
    return next(launch for launch in launches if rank in launch.workers())


@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_node_is_done_without_and_taken_in_again(tmp_path: Path, digest: str, rank: int) -> None:
    watch = Watch(tmp_path)
    with nodes(3, tmp_path, *LENGTH, pause=PAUSE) as (launches, start, _):
        watch.wait_for_step(10)
        victim = node_of(rank, launches)
        others = [launch for launch in launches if launch is not victim]
        struck = now()
        victim.kill()
        wait_until(lambda: all(launch.errors() for launch in others), HANG, "the loss is noticed")
        noticed = now() - struck
        recovered = watch.wait_for_new_step(struck)
        assert watch.layout() == "ddp-2x1-cpu"
        back = start()
        watch.wait_for_new_step(now())
        # When this node came back, the workers said why they stopped. The next loss must not give that as its reason.
        struck_again = now()
        back.workers().popitem()[1].kill()
        watch.wait_for_new_step(struck_again)
        ended = [launch.wait() for launch in (*others, back)]
        assert victim.wait().code == -signal.SIGKILL
    assert [end.code for end in ended] == [0, 0, 0]
    for end in ended[:2]:
        assert f"lost rank {rank} (node {rank}), which is dead, at step" in end.errors
        assert "another node has come; the workers save and start again with it" in end.errors
        assert "Traceback" not in end.errors
    record = check_aftermath(tmp_path, digest, EPOCHS * STEPS_PER_EPOCH)
    assert [attempt["layout"]["nnodes"] for attempt in record["attempts"]][:3] == [3, 2, 3]
    record_row(
        2,
        f"node of rank {rank}: noticed after {noticed:.1f} s, two of three train again after {recovered:.1f} s, "
        "three when it is back; same weights",
        {NOTICED: noticed, AGAIN: recovered},
    )


@pytest.mark.parametrize("shard", SHARD_MODES)
def test_a_killed_node_that_had_the_only_copy_of_a_part_is_done_without(
    tmp_path: Path, digest: str, shard: ShardMode
) -> None:
    watch = Watch(tmp_path)
    with nodes(3, tmp_path, *LENGTH, "--shard", shard, pause=PAUSE) as (launches, start, _):
        watch.wait_for_step(10)
        victim = node_of(1, launches)
        others = [launch for launch in launches if launch is not victim]
        struck = now()
        victim.kill()
        wait_until(lambda: all(launch.errors() for launch in others), HANG, "the loss is noticed")
        noticed = now() - struck
        recovered = watch.wait_for_new_step(struck)
        assert watch.layout() == f"ddp-2x1-cpu-shard-{shard}"
        back = start()
        ended = [launch.wait() for launch in (*others, back)]
    assert [end.code for end in ended] == [0, 0, 0], [end.errors for end in ended]
    record = check_aftermath(tmp_path, digest, EPOCHS * STEPS_PER_EPOCH)
    assert [attempt["layout"]["nnodes"] for attempt in record["attempts"]][:3] == [3, 2, 3]
    record_row(
        2,
        f"--shard {shard}: noticed after {noticed:.1f} s, two of three train again after {recovered:.1f} s, three when "
        "the node is back; same weights",
        {NOTICED: noticed, AGAIN: recovered},
    )


@pytest.mark.parametrize("shard", SHARD_MODES)
def test_a_stopped_node_that_had_the_only_copy_of_a_part_is_done_without(
    tmp_path: Path, digest: str, shard: ShardMode
) -> None:
    watch, timeout = Watch(tmp_path), 6
    words = [*LENGTH, "--shard", shard, "--timeout", str(timeout)]
    with nodes(3, tmp_path, *words, pause=PAUSE) as (launches, _, _):
        watch.wait_for_step(10)
        victim = node_of(0, launches)
        others = [launch for launch in launches if launch is not victim]
        struck = now()
        victim.signal_all(signal.SIGSTOP)
        wait_until(lambda: all(launch.errors() for launch in others), HANG, "the silence is noticed")
        noticed = now() - struck
        recovered = watch.wait_for_new_step(struck)
        victim.signal_all(signal.SIGCONT)
        ended = [launch.wait() for launch in (*others, victim)]
    assert [end.code for end in ended] == [0, 0, 0], [end.errors for end in ended]
    check_aftermath(tmp_path, digest, EPOCHS * STEPS_PER_EPOCH)
    record_row(
        5,
        f"node of rank 0, --shard {shard}: noticed {noticed - timeout:.1f} s after the timeout, the others train again "
        f"after {recovered:.1f} s; same weights",
        {LATE: noticed - timeout, AGAIN: recovered},
    )


def test_a_stopped_node_writes_nothing_when_it_wakes(tmp_path: Path, digest: str) -> None:
    watch, timeout = Watch(tmp_path), 6
    with nodes(3, tmp_path, *LENGTH, "--timeout", str(timeout), pause=PAUSE) as (launches, _, _):
        watch.wait_for_step(10)
        victim = node_of(0, launches)
        others = [launch for launch in launches if launch is not victim]
        struck = now()
        victim.signal_all(signal.SIGSTOP)
        wait_until(lambda: all(launch.errors() for launch in others), HANG, "the silence is noticed")
        noticed = now() - struck
        recovered = watch.wait_for_new_step(struck)
        victim.signal_all(signal.SIGCONT)
        ended = [launch.wait() for launch in (*others, victim)]
    assert [end.code for end in ended] == [0, 0, 0]
    assert "rank 0 (node 0), which is stopped, at step" in ended[0].errors
    assert "this process may no longer write to" in ended[2].errors
    check_aftermath(tmp_path, digest, EPOCHS * STEPS_PER_EPOCH)
    record_row(
        5,
        f"node of rank 0: noticed {noticed - timeout:.1f} s after the timeout, the others train again after "
        f"{recovered:.1f} s; awake, it is refused by the fence, then taken in; same weights",
        {LATE: noticed - timeout, AGAIN: recovered},
    )


def test_a_lost_rendezvous_is_waited_for(tmp_path: Path, digest: str) -> None:
    watch = Watch(tmp_path)
    with nodes(2, tmp_path, *LENGTH, pause=PAUSE) as (launches, _, store):
        watch.wait_for_step(10)
        struck = now()
        store.kill()
        wait_until(lambda: all("trying again" in launch.errors() for launch in launches), HANG, "the loss is noticed")
        noticed = now() - struck
        store.start()
        recovered = watch.wait_for_new_step(struck)
        ended = [launch.wait() for launch in launches]
    assert [end.code for end in ended] == [0, 0]
    for end in ended:
        assert "the rendezvous at 127.0.0.1:" in end.errors
        assert "Traceback" not in end.errors
    check_aftermath(tmp_path, digest, EPOCHS * STEPS_PER_EPOCH)
    said = f"noticed after {noticed:.1f} s; trains again {recovered:.1f} s after the loss"
    record_row(3, said, {NOTICED: noticed, AGAIN: recovered})


def test_a_rendezvous_that_stays_away_ends_in_6(tmp_path: Path) -> None:
    watch = Watch(tmp_path)
    with nodes(2, tmp_path, *LENGTH, "--max-restarts", "0", pause=PAUSE) as (launches, _, store):
        watch.wait_for_step(10)
        started = time.monotonic()
        store.kill()
        ended = [launch.wait() for launch in launches]
        seconds = time.monotonic() - started
    assert [end.code for end in ended] == [6, 6]
    assert all("start `ddp rendezvous --port PORT` there" in end.errors for end in ended)
    directory, record = trained(tmp_path)
    assert record["status"] in ("stopped", "failed")
    assert not directory.is_worked_in
    record_row(3, "with no restarts allowed: 6, saying what to start", {"all nodes gone": seconds})


def test_killed_workers_of_two_nodes_are_replaced_every_time(tmp_path: Path, digest: str) -> None:
    watch, seconds = Watch(tmp_path), []
    with nodes(2, tmp_path, *LENGTH, "--max-restarts", "10", pause=PAUSE) as (launches, _, _):
        watch.wait_for_step(1)
        for rank in (1, 0, 1, 1, 0):
            struck = now()
            node_of(rank, launches).workers()[rank].kill()
            seconds.append(watch.wait_for_new_step(struck))
        ended = [launch.wait() for launch in launches]
    assert [end.code for end in ended] == [0, 0]
    assert sum(end.errors.count("was killed (SIGKILL)") for end in ended) == 5
    record = check_aftermath(tmp_path, digest, EPOCHS * STEPS_PER_EPOCH)
    assert {attempt["layout"]["nnodes"] for attempt in record["attempts"]} <= {1, 2}
    worst = max(seconds)
    said = f"on two nodes: 5 of 5 recovered, median {sorted(seconds)[2]:.1f} s, worst {worst:.1f} s"
    record_row(1, said, {AGAIN: worst})


def test_an_exception_on_one_node_ends_both(tmp_path: Path) -> None:
    with nodes(2, tmp_path, *LENGTH, "--fault", "raise@13:1", pause=PAUSE) as (launches, _, _):
        ended = sorted((launch.wait() for launch in launches), key=lambda end: end.code)
    assert [end.code for end in ended] == [2, 6]
    assert ended[0].errors.endswith("ddp: error: rank 1 (node 1): RuntimeError: scripted fault raise@13:1\n")
    assert "Traceback" not in ended[0].errors, "no frame of it is the user's"
    assert ended[1].errors.endswith("another node has ended this launch; its own message says why\n")
    assert "Traceback" not in ended[1].errors
    record_row(15, "on two nodes: 2 and the error on its own, 6 on the other, which says so")


def test_a_request_to_one_node_stops_both(tmp_path: Path) -> None:
    with nodes(2, tmp_path, *LENGTH, pause=PAUSE) as (launches, _, _):
        Watch(tmp_path).wait_for_step(10)
        launches[1].signal(signal.SIGTERM)
        ended = [launch.wait() for launch in launches]
    assert [end.code for end in ended] == [75, 75]
    assert "(SIGTERM); saved, continue with `ddp train " in ended[1].errors
    assert "(another rank was asked to); saved, continue with `ddp train " in ended[0].errors
    directory, record = trained(tmp_path)
    newest = find_checkpoints(directory.checkpoints)[0]
    assert record["status"] == "stopped"
    assert newest.step == read_metrics(directory.metrics, "step")[-1]["step"]
    record_row(28, "SIGTERM to one of two nodes: 75 on both, saved")


def test_a_launch_that_one_node_has_stopped_goes_on_with_the_same_id(tmp_path: Path, digest: str) -> None:
    with nodes(2, tmp_path, *LENGTH, pause=PAUSE) as (launches, start, _):
        Watch(tmp_path).wait_for_step(10)
        launches[1].signal(signal.SIGTERM)
        assert [launch.wait().code for launch in launches] == [75, 75]
        again = [start(), start()]
        ended = [launch.wait() for launch in again]
    assert [end.code for end in ended] == [0, 0], [end.errors for end in ended]
    check_aftermath(tmp_path, digest, EPOCHS * STEPS_PER_EPOCH)

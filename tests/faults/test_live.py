"""A worker is lost, and the others go on: same weights, same processes, no step done again."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ddp_core.observe.metrics import read_metrics
from ddp_core.record.directory import RunDirectory
from tests.faults.launches import DOTS, Watch, check_aftermath, launched, train_words, undisturbed
from tests.faults.scenarios import Scenario, check_no_step_again, on
from tests.support.commands import Ended, ddp, trained, wait_until
from tests.support.processes import HANG
from tests.support.wording import said_as_before

STRUCK = str(Path(DOTS).with_name("struck.py"))
STEPS = 48
KEPT = ("--keep-for-audit", "5")
DIGESTS = ("weights_sha256", "optimizer_sha256", "ema_sha256")


class Ends(NamedTuple):
    """What one process that nobody disturbs ends with."""

    digests: dict[str, str]
    kept: dict[str, Any]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """How `struck` ends after its steps, trained by one process."""
    return ends_alone(tmp_path_factory.mktemp("alone"), "cpu")


def ends_of(output: Path) -> Ends:
    _, record = trained(output)
    return Ends({name: record[name] for name in DIGESTS}, record["kept"])


def ends_alone(output: Path, device: str, env: Mapping[str, str] | None = None) -> Ends:
    """How `struck` ends after its steps, trained by one process on this device."""
    ended = ddp("train", STRUCK, *KEPT, "--log-every", "1", "--device", device, "--output", output, env=env)
    assert ended.code == 0, ended.errors
    return ends_of(output)


def train(
    output: Path,
    kills: Sequence[str],
    *words: str,
    device: str = "cpu",
    ranks: int = 3,
    env: Mapping[str, str] | None = None,
) -> Ended:
    """Train `struck` on so many ranks with a live recovery, of which some are killed."""
    live = ["--recovery", "live", "--timeout", "20", *KEPT, "--device", device]
    full = train_words(output, *live, *words, ranks=ranks, experiment=STRUCK)
    return ddp(*full, env={"STRUCK_KILLS": ",".join(kills), **(env or {})}, timeout=2 * HANG)


def check_end(output: Path, ended: Ended, ends: Ends) -> dict[str, Any]:
    """Check that the run has ended as if nothing had happened, with the same kept states; returns its record."""
    assert ended.code == 0, f"{ended.output}\n{ended.errors}"
    assert "Traceback" not in ended.errors
    assert ends_of(output) == ends
    directory, record = trained(output)
    lines = [(what, int(step), int(count)) for what, step, count in told(directory)]
    expected = {"step": lambda step: step, "epoch": lambda step: step // 8, "end": lambda step: 1}
    assert all(count == expected[what](step) for what, step, count in lines), "each once, by what callbacks keep"
    assert {(what, step) for what, step, _ in lines} == {
        *(("step", step) for step in range(1, STEPS + 1)),
        *(("epoch", step) for step in range(8, STEPS + 1, 8)),
        ("end", STEPS),
    }
    return record


def check_live(output: Path, ended: Ended, ends: Ends, kills: Sequence[str]) -> None:
    """Check that the others have gone on, repeated nothing, and told each step once."""
    record, lost = check_end(output, ended, ends), len(kills)
    directory, _ = trained(output)
    counts = Counter((each["kind"], each["step"]) for each in read_metrics(directory.metrics))
    repeated = {kind: steps for (kind, steps), count in counts.items() if count > 1 and kind != "resume"}
    assert not repeated
    assert sorted(step for kind, step in counts if kind == "step")[1:] == list(range(3, STEPS + 1))
    assert sorted(step for kind, step in counts if kind == "evaluation") == list(range(8, STEPS + 1, 8))
    assert "starting the workers again" not in ended.errors
    assert "no step repeated" in ended.output
    assert " lost after step " in ended.output
    assert "resumed at step" not in ended.output
    assert ended.errors.count("was killed (SIGKILL); the others go on") == lost
    check_no_step_again(directory.metrics)
    ranks = [attempt["layout"]["nproc_per_node"] for attempt in record["attempts"]]
    assert {ranks[0], ranks[0] - 1} <= set(ranks) or lost > 1
    check_memberships(directory, record)
    again = [line for line, count in Counter(map(tuple, told(directory))).items() if count > 1]
    assert len(again) <= 2 * sum(kill.startswith("0.") for kill in kills), "only what a lost rank 0 may have done"


def told(directory: RunDirectory) -> list[list[str]]:
    """What callbacks were told: method, step, and how often the method was called by then."""
    return [line.split() for line in (directory.path / "told.txt").read_text().splitlines()]


def check_memberships(directory: RunDirectory, record: dict[str, Any]) -> None:
    """Check that metrics and record tell the same of each membership, and that the numbers of ranks add up."""
    assert record["attempts"][0]["membership"] == 0
    numbers = {attempt["membership"]: attempt["layout"]["nproc_per_node"] for attempt in record["attempts"]}
    ranks = numbers[0]
    for each in map(json.loads, directory.metrics.read_text().splitlines()):
        if each["kind"] == "resume":
            ranks += len(each["joined"]) - len(each["lost"])
            assert each["ranks"] == ranks == numbers[each["membership"]]
            assert 0 <= each["pause"] < HANG


@pytest.mark.parametrize("scenario", [each for each in on("processes") if each.values[0].kills])
def test_the_others_go_on(tmp_path: Path, ends: Ends, scenario: Scenario) -> None:
    check_live(tmp_path, train(tmp_path, scenario.kills), ends, scenario.kills)


@pytest.mark.slow
@pytest.mark.parametrize("kill", ["1.0 forward 20", "0.0 evaluation 5"])
def test_a_worker_that_hangs_is_replaced(tmp_path: Path, ends: Ends, kill: str) -> None:
    ended = train(tmp_path, [kill], "--timeout", "3", env={"STRUCK_HANGS": "yes"})
    check_end(tmp_path, ended, ends)
    assert f"rank {kill[0]} (node 0) has not come to the others for 3 s; it is killed now" in ended.errors
    assert ended.errors.count("was killed (SIGKILL); the others go on") == 1
    assert "no step repeated" in ended.output


HEAD = "from ddp_core import Callback\nfrom ddp_core.observe.step import StepObserver\n\n\n"
SEES_ALL = 'class Mine(Callback):\n    ranks = "all"\n\n\ncallbacks = [Mine()]\n'
OBSERVES = "class Mine(StepObserver):\n    pass\n\n\ncallbacks = [Mine()]\n"


@pytest.mark.parametrize(
    ("code", "words"),
    [(SEES_ALL, []), (OBSERVES, []), ("", ["--reduction", "plain"])],
    ids=["callbacks of all ranks", "an observer", "plain"],
)
def test_where_it_cannot_be_had_it_is_refused(tmp_path: Path, code: str, words: list[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"{Path(DOTS).read_text()}\n\n{HEAD}{code}")
    ended = ddp(*train_words(tmp_path / "out", "--recovery", "live", *words, experiment=file))
    assert ended.code == 2, ended.errors
    said_as_before(ended.errors)


READS = """
import os
from dataclasses import replace
from dots import dots as made, experiment, network

def dots(size: int = 96, held_out: int = 10):
    with open({built!r}, "a") as lines:
        print(os.getpid(), file=lines)
    return replace(made(size, held_out), digest=None, files=(__file__,))
"""


@pytest.mark.slow
def test_each_process_reads_the_data_once_and_a_new_one_before_it_joins(tmp_path: Path) -> None:
    file, built = tmp_path / "mine.py", tmp_path / "built.txt"
    shutil.copy(DOTS, tmp_path / "dots.py")
    file.write_text(READS.format(built=str(built)))
    watch = Watch(tmp_path / "output")
    words = train_words(
        watch.output, "--recovery", "live", "--timeout", "20", "--guard", "off", ranks=3, experiment=file
    )
    with launched(*words, pause=0.05) as launch:
        watch.wait_for_step(10)
        launch.workers()[0].kill()
        wait_until(lambda: len(watch.records("resume")) > 1, HANG, "a new worker joins")
        workers = {str(process.pid) for process in launch.workers().values()}
        ended = launch.end()
    assert ended.code == 0, ended.errors
    assert len(workers) == 3
    counts = Counter(built.read_text().split())
    assert [counts[pid] for pid in workers] == [1] * 3
    _, record = trained(watch.output)
    assert record["data"]["parts"] == 1, "also where the newest rank 0 has not read the files"
    (digested,) = [line for line in ended.output.splitlines() if "data: digested" in line]
    assert "1 file" in digested


@pytest.mark.full
def test_with_shards_all_start_again_and_the_user_is_told(tmp_path: Path) -> None:
    words = ["--recovery", "live", "--shard", "optimizer", "--fault", "kill@6:1", "--set", "epochs=2"]
    ended = ddp(*train_words(tmp_path / "run", *words))
    assert ended.code == 0, ended.errors
    assert ended.errors.count("with --shard optimizer each part is on one rank alone") == 1
    digest = undisturbed(tmp_path / "undisturbed", "--set", "epochs=2")
    check_aftermath(tmp_path / "run", digest, steps=16)

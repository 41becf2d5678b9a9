"""Faults in real containers: each row of the fault matrix that needs a Docker engine, in as little time as possible."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from ddp_core.model.builders import small_cnn
from ddp_lab.chaos.judge import two_writers
from tests.docker.nodes import QUIET, Start, run_drill
from tests.faults.matrix import AGAIN, LATE, NOTICED, record_row

pytestmark = [pytest.mark.docker, pytest.mark.timeout(420)]


TWO_FAULTS = [
    {2: "{fault: kill, node: rank-0, at_step: 30, seconds: 8}", 28: "{fault: down, at_step: 90}"},
    {3: "{fault: kill, node: rendezvous, at_step: 30}", 5: "{fault: pause, node: rank-0, at_step: 90, seconds: 10}"},
]
"""By row of the fault matrix."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(TWO_FAULTS[0], id="killed node, down and up"),
        pytest.param(TWO_FAULTS[1], id="lost rendezvous, paused node"),
    ],
)
def test_a_drill_loses_nothing(image: str, tmp_path: Path, faults: dict[int, str]) -> None:
    report, _ = run_drill(
        tmp_path,
        f"""
        settings: [epochs=8]
        nodes: 2
        timeout: 6
        checkpoint_every: 10
        faults: [{", ".join(faults.values())}]
        """,
    )
    assert report["identical"]
    assert (report["left_behind"], report["remarks"]) == ([], [])
    assert [fault["outcome"] for fault in report["faults"]] == ["recovered"] * 2
    for row, fault in zip(faults, report["faults"], strict=True):
        assert row != 28 or fault["steps_lost"] == 0
        assert row != 5 or fault["noticed_seconds"] < 6 + 5
        lost = f"{fault['steps_lost']} steps repeated"
        # Nobody notices a pause before --timeout.
        noticed = {LATE: fault["noticed_seconds"] - 6} if row == 5 else {NOTICED: fault["noticed_seconds"]}
        said = f"D: noticed after {fault['noticed_seconds']} s, {lost}"
        record_row(row, said, noticed | {AGAIN: fault["resumed_seconds"]})


@pytest.mark.slow
def test_full_disk_ends_with_4_and_goes_on_once_there_is_room(image: str, tmp_path: Path) -> None:
    report, said = run_drill(
        tmp_path,
        """
        settings: [epochs=12]
        nodes: 2
        timeout: 6
        checkpoint_every: 10
        faults: [{fault: disk-full, at_step: 40}]
        """,
    )
    (fault,) = report["faults"]
    assert fault["outcome"] == "recovered"
    assert 4 in fault["exit_codes"].values()
    assert "disk full" in said
    assert "Traceback" not in said
    assert report["left_behind"] == []
    said = f"D: {sorted(set(fault['exit_codes'].values()))}, weights as undisturbed"
    record_row(8, said, {AGAIN: fault["resumed_seconds"]})


@pytest.mark.slow
def test_cut_off_minority_exits_6_and_writes_nothing_while_the_others_end_the_run(start: Start) -> None:
    nodes = start({"nodes": 3}, epochs=8)
    nodes.at_step(30)
    victim = nodes.of_rank(0)
    began = time.time()
    nodes.cluster.cut_off(victim)
    nodes.until(lambda: nodes.words.first_notice(began, not_from=victim) is not None, 40)
    noticed = time.time() - began
    nodes.until(lambda: nodes.progress.completed, 120)
    nodes.until(nodes.ended, 150)
    codes = nodes.cluster.exit_codes()
    assert codes.pop(victim) == 6, nodes.said()[-4000:]
    assert set(codes.values()) == {0}
    assert nodes.progress.path is not None
    assert two_writers(nodes.progress.path) is None
    said = f"D: noticed after {noticed:.1f} s; the others end with 0, the one cut off with 6"
    record_row(6, said, {LATE: noticed - float(str(QUIET["timeout"]))})


@pytest.mark.slow
def test_slow_link_is_waited_for_and_not_taken_for_a_loss(start: Start) -> None:
    nodes = start({"nodes": 2, "faults": [{"fault": "slow", "at_step": 1}]}, epochs=4)
    nodes.at_step(5)
    nodes.cluster.slow_down("node-2", 3000)
    nodes.progress.look()
    begun = nodes.progress.step + 2  # the step that is running may have sent its gradients before

    def later() -> list[dict[str, Any]]:
        return [each for each in nodes.progress.records if each["kind"] == "step" and each["step"] >= begun]

    nodes.until(lambda: len(later()) > 1)
    nodes.cluster.speed_up("node-2")
    first, last = later()[:2]
    slow = (last["time"] - first["time"]) / (last["step"] - first["step"])
    gradients = 32 * sum(parameter.numel() for parameter in small_cnn(width=24).parameters())
    assert slow > 0.5 * gradients / 3e6, "they have to pass through the link in each step"
    assert nodes.verdict().exit_code == 0
    nodes.progress.look()
    assert nodes.progress.attempts == 1
    record_row(7, f"D: a link of 3 Mbit/s makes a step take {slow:.2f} s; nobody is taken for dead")


@pytest.mark.slow
def test_node_out_of_memory_is_named_and_ends_with_4(start: Start) -> None:
    nodes = start({"nodes": 2}, "--max-restarts", "0", epochs=1000)
    nodes.at_step(5)
    nodes.cluster.starve("node-2")
    verdict = nodes.verdict()
    assert verdict.exit_code == 4, (verdict, nodes.said()[-3000:])
    assert any("node-2 ran out of memory" in line for line in verdict.lines)
    record_row(16, f"D: {verdict.exit_code}, {next(line for line in verdict.lines if 'memory' in line)}")

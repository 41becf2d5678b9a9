"""`make soak` counts what passed and failed, keeps what failed, and leaves no busy loop behind."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ddp_core.distributed.processes import state_of
from tests.support.commands import ROOT, wait_until
from tests.support.processes import HANG
from tools import soak

REPORT = """<testsuites><testsuite>
<testcase classname="a" name="good"/>
<testcase classname="a" name="bad"><failure message="no">assert 1 == 2</failure></testcase>
<testcase classname="a" name="broken"><error message="no">left behind</error></testcase>
<testcase classname="a" name="not here"><skipped/></testcase>
</testsuite></testsuites>"""


def test_a_report_is_read_with_its_failures_and_errors(tmp_path: Path) -> None:
    assert list(soak.outcomes(tmp_path / "none.xml")) == []
    (tmp_path / "round.xml").write_text(REPORT)
    assert list(soak.outcomes(tmp_path / "round.xml")) == [
        ("a::good", "passed", ""),
        ("a::bad", "failed", "assert 1 == 2"),
        ("a::broken", "failed", "left behind"),
        ("a::not here", "skipped", ""),
    ]


def test_a_round_without_a_test_or_with_a_failure_is_not_clean() -> None:
    assert soak.was_clean({"exit_code": 0, "passed": 3})
    assert not soak.was_clean({"exit_code": 0, "passed": 0})
    assert not soak.was_clean({"exit_code": 1, "passed": 3})


TESTS = """
import os, pytest

def test_good():
    pass

def test_bad():
    assert os.getpid() == 0
"""


@pytest.mark.slow
def test_rounds_are_counted_and_failures_kept(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text(TESTS)
    words = ["-m", "tools.soak", "--rounds", "2", "--output", str(tmp_path / "soak"), str(tmp_path / "test_two.py")]
    ended = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=HANG)
    assert ended.returncode == 1, ended.stderr
    assert "0 of 2 rounds without a failure" in ended.stdout
    results = json.loads((tmp_path / "soak" / "soak.json").read_text())["results"]
    assert (results["clean_rounds"], len(results["rounds"])) == (0, 2)
    assert [list(counts.values()) for counts in results["tests"].values()] == [[2], [2]]
    assert "os.getpid() == 0" in (tmp_path / "soak" / "round-2-failure-1.txt").read_text()


@pytest.mark.slow
def test_the_busy_loops_end_with_a_soak_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "test_long.py").write_text("import time\n\ndef test_long():\n    time.sleep(600)\n")
    words = ["-m", "tools.soak", "--output", str(tmp_path / "soak"), str(tmp_path / "test_long.py")]
    soaking = psutil.Popen([sys.executable, *words], cwd=ROOT, stdout=subprocess.DEVNULL)

    others: list[psutil.Process] = []

    def loops() -> list[psutil.Process]:
        return [child for child in soaking.children() if soak.BUSY in child.cmdline()]

    try:
        wait_until(lambda: len(soaking.children()) > soak.usable_cores(), HANG, "the round has begun")
        left, others = loops(), soaking.children(recursive=True)
        assert len(left) == soak.usable_cores()
        soaking.send_signal(signal.SIGKILL)
        wait_until(lambda: all(state_of(loop.pid) == "gone" for loop in left), HANG, "the loops are gone")
    finally:
        for process in (soaking, *others):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        soaking.wait()

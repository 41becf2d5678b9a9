"""Workers that the nursery starts: what they are given, how their end is reported, and that none outlives it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from ddp_core.distributed.processes import state_of
from ddp_core.launch.nursery import Nursery
from tests.support.commands import wait_until
from tests.support.processes import HANG, run_processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the nursery is for Linux")


def act(words: Sequence[str]) -> int:
    """The function that the nursery's workers run in these tests."""
    what, *rest = words
    if what == "write":
        Path(rest[0]).write_text(" ".join([os.environ["RANK"], str(os.getsid(0) == os.getpid()), *rest[1:]]))
        return 7
    if what == "raise":
        raise ValueError("on purpose")
    time.sleep(600)
    return 0


def lead(rank: int, world_size: int, case: str, place: str) -> object:
    """Run one case in a process of its own, because a nursery must be forked from a process without threads."""
    return CASES[case](Path(place))


def codes(place: Path) -> object:
    with Nursery(act) as nursery:
        written = nursery.start(["write", str(place / "said"), "x"], {**os.environ, "RANK": "3"})
        failed = nursery.start(["raise"], os.environ)
        sleeping = nursery.start(["sleep"], {**os.environ, "RANK": "5"})
        assert sleeping.poll() is None
        wait_until(lambda: psutil.Process(sleeping.pid).name() == "ddp-rank-5", HANG, "it has its name")
        sleeping.send_signal(signal.SIGTERM)
        ended = (written.wait(HANG), failed.wait(HANG), sleeping.wait(HANG))
        sleeping.send_signal(signal.SIGTERM)
        sleeping.kill()
        return ended


def leaving(place: Path) -> object:
    with Nursery(act) as nursery:
        sleeping = nursery.start(["sleep"], os.environ)
    wait_until(lambda: state_of(sleeping.pid) == "gone", HANG, "it has gone with the nursery")
    return sleeping.poll()


def killed(place: Path) -> object:
    with Nursery(act) as nursery:
        sleeping = nursery.start(["sleep"], os.environ)
        os.kill(nursery.pid, signal.SIGKILL)
        wait_until(lambda: state_of(sleeping.pid) == "gone", HANG, "it has gone with the nursery")
        code = sleeping.wait(HANG)
        try:
            nursery.start(["sleep"], os.environ)
        except OSError:
            return code


class Asked(Exception):
    """What the handler of a signal raises, as that of torch's agent does."""


def interrupted(place: Path) -> object:
    def ask(*_: object) -> None:
        raise Asked

    signal.signal(signal.SIGALRM, ask)
    with Nursery(act) as nursery:
        first = nursery.start(["sleep"], os.environ)
        os.kill(nursery.pid, signal.SIGSTOP)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            nursery.start(["raise"], os.environ)
        except Asked:
            os.kill(nursery.pid, signal.SIGCONT)
        second = nursery.start(["write", str(place / "said")], {**os.environ, "RANK": "3"})
        codes = second.wait(HANG), first.poll()
        first.kill()
        return *codes, first.wait(HANG)


CASES = {"codes": codes, "leaving": leaving, "killed": killed, "interrupted": interrupted}
ENDS = {
    "codes": (7, 1, -signal.SIGTERM),
    "leaving": -signal.SIGKILL,
    "killed": -signal.SIGKILL,
    "interrupted": (7, None, -signal.SIGKILL),
}


@pytest.mark.parametrize("case", CASES)
def test_each_end_is_told_and_no_worker_outlives_the_nursery(tmp_path: Path, case: str) -> None:
    """The nursery is left or killed, and a signal interrupts a start, whose code is then taken for no other's."""
    assert run_processes(lead, 1, case, str(tmp_path)) == [ENDS[case]]
    if case == "codes":
        assert (tmp_path / "said").read_text() == "3 True x"

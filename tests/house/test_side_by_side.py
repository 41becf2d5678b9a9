"""Commands that run beside each other are told of as they end, and none outlives the block, however that ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddp_core.distributed.processes import state_of
from tests.support.commands import ROOT, wait_until
from tests.support.processes import HANG
from tools.side_by_side import ended

SLEEP = "import time; time.sleep(600)"


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def noting(place: Path) -> list[str]:
    """A command that writes its own process number and that of its child to a file, and sleeps."""
    child = f"child = subprocess.Popen([sys.executable, '-S', '-c', {SLEEP!r}])"
    note = f"Path({str(place)!r}).write_text(f'{{os.getpid()}} {{child.pid}}\\n')"
    return python(f"import os, subprocess, sys\nfrom pathlib import Path\n{child}\n{note}\n{SLEEP}")


def pids(place: Path) -> list[int]:
    wait_until(lambda: place.exists() and place.read_text().endswith("\n"), HANG, "the command notes its processes")
    return [int(pid) for pid in place.read_text().split()]


def await_gone(numbers: list[int]) -> None:
    wait_until(lambda: all(state_of(pid) == "gone" for pid in numbers), HANG, "no process is left")


def test_each_is_told_of_when_it_has_ended_and_some_run_at_a_time(tmp_path: Path) -> None:
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.02)"
    commands = {"long": python(wait), "short": python("print('out')"), "last": python("raise SystemExit('why')")}
    seen = []
    with ended(commands, 2, HANG) as results:
        for key, how in results:
            seen.append((key, how.code, how.last_line))
            if key == "last":  # it ran in the place of the short one, beside the long one
                (tmp_path / "go").touch()
    assert seen == [("short", 0, "out"), ("last", 1, "why"), ("long", 0, "nothing was said")]


def test_its_processor_time_is_told() -> None:
    busy = "import time\nwhile time.process_time() < 0.5: pass"
    with ended({"busy": python(busy), "idle": python("")}, 1, HANG) as results:
        seconds = {key: how.processor_seconds for key, how in results}
    assert seconds["busy"] >= 0.5 > seconds["idle"]


def test_what_takes_too_long_is_ended() -> None:
    with ended({"hangs": python(SLEEP)}, 1, 0.5) as results:
        ((_, how),) = list(results)
    assert how.code is None


def test_a_block_that_is_left_early_ends_the_others_with_their_children(tmp_path: Path) -> None:
    with ended({"hangs": noting(tmp_path / "pids"), "short": python("")}, 2, HANG) as results:
        assert next(results)[0] == "short"
        hanging = pids(tmp_path / "pids")
    await_gone(hanging)


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_and_is_said_in_one_line(by: signal.Signals, tmp_path: Path) -> None:
    code = (
        "import json, sys\n"
        "from ddp_core.base.ending import said_by\n"
        "from tools.side_by_side import ended\n"
        "@said_by('test')\n"
        "def main():\n"
        "    with ended({'hangs': json.loads(sys.argv[1])}, 1, 600.0) as results:\n"
        "        return len(list(results))\n"
        "sys.exit(main())\n"
    )
    words = [sys.executable, "-c", code, json.dumps(noting(tmp_path / "pids"))]
    process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        hanging = pids(tmp_path / "pids")
        time.sleep(0.3)  # so that the command has been started in full
        process.send_signal(by)
        _, errors = process.communicate(timeout=HANG)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, errors) == (130, "test: interrupted\n")
    await_gone(hanging)

"""Child processes and their folder end with the command that has started them, whatever ends that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ddp_core.base.errors import ExitCode
from ddp_core.distributed.children import error_of
from tests.support.commands import ROOT
from tests.support.processes import HANG

COMMAND = """
    import subprocess, sys
    from ddp_core.distributed.children import Children
    with Children("ddp-test-") as children:
        child = children.start([sys.executable, "-c", sys.argv[1], str(children.folder)])
        child.wait()
    """
CHILD = """
    import pathlib, subprocess, sys
    folder = pathlib.Path(sys.argv[1])
    (folder / "locked").mkdir()
    (folder / "locked" / "file").touch()
    (folder / "locked").chmod(0o500)
    subprocess.Popen(["sleep", "600"])
    print(folder, flush=True)
    subprocess.run(["sleep", "600"])
    """


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_the_command_ends_what_it_has_started_and_removes_the_folder(
    tmp_path: Path, number: signal.Signals
) -> None:
    settings = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    words = [sys.executable, "-c", textwrap.dedent(COMMAND), textwrap.dedent(CHILD)]
    command = subprocess.Popen(words, env=settings, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    folder = Path(command.stdout.readline().strip())
    assert folder.parent == tmp_path
    descriptor = os.open(folder, os.O_RDONLY)
    command.send_signal(number)
    # All that was started holds the pipe, and so does the watcher no more: the rest has ended when this returns.
    command.communicate(timeout=HANG)
    _await_removal(descriptor)
    assert list(tmp_path.iterdir()) == []


def _await_removal(descriptor: int) -> None:
    """Wait until the folder that is open as `descriptor` has no name any more."""
    while os.fstat(descriptor).st_nlink:
        os.sched_yield()
    os.close(descriptor)


def test_the_error_of_a_command_is_what_it_calls_one() -> None:
    lines = ["ddp: error: rank 1: no room", "ddp: rank 0 left after it", "terminate called"]
    error = error_of(4, lines)
    assert (str(error), error.exit_code) == ("rank 1: no room", ExitCode.RESOURCES)
    assert str(error_of(75, ["ddp: stopped: at step 3", ""])) == "stopped: at step 3"
    assert str(error_of(-9, ["one", " "], ["train", "x"])) == "`ddp train x` was killed (SIGKILL): one"
    assert str(error_of(1, [])) == "no message"

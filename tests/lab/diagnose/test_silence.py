"""When processes are silent: those that compute are not, wherever they stand."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from ddp_lab.diagnose import silence
from tests.support.commands import wait_until

STANDS = "rank 0 stands in train.py:3"


def test_a_process_that_computes_is_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("SECONDS", 0.4), ("_ASK_SECONDS", 0.1), ("_LOOK_SECONDS", 0.02)):
        monkeypatch.setattr(silence, name, seconds)
    monkeypatch.setattr(silence.Silence, "_ask", lambda _: STANDS)
    # It computes until it is told to wait.
    script = "import os, threading\nwhile not os.path.exists('wait'): pass\nthreading.Event().wait()"
    with subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path) as process:
        try:
            looks = silence.Silence([process.pid], tmp_path, [tmp_path])
            until = time.monotonic() + 1.5
            while time.monotonic() < until:
                assert looks.where() == ""
                time.sleep(0.01)
            (tmp_path / "wait").touch()
            wait_until(lambda: looks.where() == STANDS, 60, "it is silent")
        finally:
            process.kill()

"""One run per directory, and a lock that dies with its holder."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.record.lock import RunLock, is_held

CONTEXT = multiprocessing.get_context("forkserver")


def _hold(directory: Path, pipe: Connection) -> None:
    with RunLock(directory):
        pipe.send(os.getpid())
        time.sleep(60)


def _hold_and_fork(directory: Path, pipe: Connection, gate: Connection | None) -> None:
    """Hold the lock and fork a worker; the worker's process id goes through the pipe.

    Without a gate, the worker sends the id after it has closed its copy of the lock. With a gate, this process sends it
    at once, and the worker keeps its copy until the gate opens.
    """
    if gate is not None:
        os.register_at_fork(after_in_child=gate.recv)
    with RunLock(directory):
        worker = os.fork()
        if worker == 0 and gate is None:
            pipe.send(os.getpid())
        elif worker != 0 and gate is not None:
            pipe.send(worker)
        time.sleep(60)
        os._exit(0)


@contextmanager
def _holder(directory: Path, hold: Callable[..., None] = _hold, *words: object) -> Iterator[int]:
    """Run a process that holds the lock until the block ends; yield the process id that it sends."""
    here, there = CONTEXT.Pipe(duplex=False)
    child = CONTEXT.Process(target=hold, args=(directory, there, *words), daemon=True)
    child.start()
    try:
        assert here.poll(30), "the child did not take the lock"
        yield here.recv()
    finally:
        child.kill()
        child.join()


def test_the_second_run_in_a_directory_is_told_who_holds_it(tmp_path: Path) -> None:
    assert not is_held(tmp_path)
    with _holder(tmp_path) as pid:
        assert is_held(tmp_path)
        with pytest.raises(UserError, match=rf"process {pid} on {socket.gethostname()}, since \d{{4}}-") as caught:
            RunLock(tmp_path).acquire()
        assert caught.value.exit_code == ExitCode.BAD_INPUT
        assert str(tmp_path) in str(caught.value)
        assert is_held(tmp_path), "asking must not take it away"


def test_a_forked_worker_that_outlives_the_holder_does_not_keep_the_lock(tmp_path: Path) -> None:
    with _holder(tmp_path, _hold_and_fork, None) as worker:
        assert is_held(tmp_path)
    try:
        os.kill(worker, 0)
        assert not is_held(tmp_path)
    finally:
        os.kill(worker, signal.SIGKILL)


def test_a_worker_that_is_still_being_forked_when_the_holder_dies_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, gate = CONTEXT.Pipe(duplex=False)
    with _holder(tmp_path, _hold_and_fork, closed) as worker:
        pass
    try:
        assert is_held(tmp_path), "the fork has not closed its copy yet"
        monkeypatch.setattr("ddp_core.record.lock._PATIENCE_SECONDS", 30.0)
        opening = threading.Timer(0.05, gate.send, args=(None,))
        opening.start()
        assert not is_held(tmp_path)
        with RunLock(tmp_path):
            pass
        opening.join()
    finally:
        os.kill(worker, signal.SIGKILL)


def test_the_same_process_cannot_hold_it_twice(tmp_path: Path) -> None:
    with RunLock(tmp_path), pytest.raises(UserError, match=str(os.getpid())):
        RunLock(tmp_path).acquire()
    lock = RunLock(tmp_path).acquire()
    lock.release()
    lock.release()


def test_probing_does_not_turn_a_newcomer_away(tmp_path: Path) -> None:
    RunLock(tmp_path).acquire().release()
    with (tmp_path / "run.lock").open() as probe:
        fcntl.flock(probe, fcntl.LOCK_SH)
        assert not is_held(tmp_path, patience=0.0), "nor is it taken for a holder by another probe"
        threading.Timer(0.1, lambda: fcntl.flock(probe, fcntl.LOCK_UN)).start()
        with RunLock(tmp_path):
            pass


def test_a_place_that_cannot_be_written_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot write") as caught:
        RunLock(tmp_path / "file").acquire()
    assert caught.value.exit_code == ExitCode.RESOURCES
    assert not is_held(tmp_path / "nowhere")

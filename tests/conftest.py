"""What holds for every test: single-threaded mathematics, and no process left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import sys
import time
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker

import psutil
import pytest

# More threads than cores would have ranks wait for each other, and results are compared on one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# `ddp` says so itself before it imports torch; the fork server has imported torch already.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# Descendants inherit it, also those that have left the tree; a process that outlives its test is found by it.
_MARK, _SESSION = "DDP_TEST_SESSION", secrets.token_hex(8)
os.environ[_MARK] = _SESSION

# Orphans below become children here, where they are looked for.
if sys.platform == "linux":
    PR_SET_CHILD_SUBREAPER = 36
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)

# A machine with other things to do takes its time over the end of a process; one that stays, stays longer than this.
_LEAVING_SECONDS = 30


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that need more CUDA devices than there are. Last: torch is asked only where -m has left some."""
    for marker, needed in (("gpu", 1), ("gpu2", 2)):
        chosen = [item for item in items if item.get_closest_marker(marker)]
        if chosen and (found := _cuda_devices()) < needed:
            for item in chosen:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), torch finds {found}"))


def _cuda_devices() -> int:
    import torch

    return torch.cuda.device_count()


def _own_helpers() -> set[int | None]:
    """multiprocessing's fork server and resource tracker live as long as the test session, by design."""
    return {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _children() -> list[psutil.Process]:
    helpers = _own_helpers()
    return [child for child in psutil.Process().children(recursive=True) if child.pid not in helpers and _lives(child)]


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _strays() -> list[psutil.Process]:
    """Everything that carries this session's mark, wherever in the process tree it is."""
    helpers, found = _own_helpers() | {os.getpid()}, []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid not in helpers and process.environ().get(_MARK) == _SESSION and _lives(process):
                found.append(process)
    return found


@pytest.fixture(autouse=True)
def leaves_no_child() -> Iterator[None]:
    """Fails the test whose processes are still there after it."""
    before = {child.pid for child in _children()}
    yield
    deadline = time.monotonic() + _LEAVING_SECONDS
    while (left := [child for child in _children() if child.pid not in before]) and time.monotonic() < deadline:
        time.sleep(0.05)
    described = [f"{child.pid}: {' '.join(_command(child))[:200]}" for child in left]
    for child in left:
        child.kill()
    assert not left, f"processes left behind: {described}"


@pytest.fixture(scope="session", autouse=True)
def leaves_no_stray() -> Iterator[None]:
    """Fails the session when a process that no longer has a parent among the tests outlives them."""
    yield
    deadline = time.monotonic() + _LEAVING_SECONDS
    while (left := _strays()) and time.monotonic() < deadline:
        time.sleep(0.1)
    described = [f"{process.pid}: {' '.join(_command(process))[:200]}" for process in left]
    for process in left:
        process.kill()
    assert not left, f"processes left behind by the test session: {described}"

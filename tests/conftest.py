"""What holds for every test: mathematics on one thread, and no process left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil
import pytest

from ddp_core.numerics.limits import LIMITS
from ddp_core.record.environment import tell_children_of_code
from tests.support.tiers import FULL_FOLDERS
from tests.support.wording import UPDATE

# With more threads than cores, ranks would wait for each other. Results are compared on one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# `ddp` sets this before it imports torch. The fork server has imported torch before `ddp` runs, so it is set here.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# Some experiments ask for portable numerics, which need these variables before torch is loaded. The fork server has
# loaded it before `ddp` runs, so they are set here, too.
os.environ.update(LIMITS)
# A rehearsal takes seconds; the tests of it ask for it.
os.environ["DDP_REHEARSAL"] = "off"

# Each run asks git which commit it trains, unless an image has said so: here it is asked once for all.
tell_children_of_code()

# All descendants inherit this variable, even those that have left the process tree: it finds what outlives the tests.
_MARK, _SESSION = "DDP_TEST_SESSION", secrets.token_hex(8)
os.environ[_MARK] = _SESSION

# A descendant whose parent has ended becomes a child of this process, where `_children` finds it.
if sys.platform == "linux":
    PR_SET_CHILD_SUBREAPER = 36
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)

# On a busy machine a process may need some seconds to end. A process that was left behind stays longer than this.
_LEAVING_SECONDS = 30


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that keeps what errors and commands say now."""
    parser.addoption("--update-wording", action="store_true", help="keep the wording that the tests of this run meet")


def pytest_configure(config: pytest.Config) -> None:
    """Hear interrupts, and know the marker of pytest-timeout where that is missing: `make gpu-check` runs so."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's job in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--update-wording"):
        os.environ[UPDATE] = "1"
    if not config.pluginmanager.has_plugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): needs pytest-timeout")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark as `full` all tests of some folders."""
    if item.nodeid.startswith(FULL_FOLDERS):
        item.add_marker("full")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that need packages that are not installed, or more CUDA devices than there are.

    This hook runs last, so that torch is asked only if the option -m has left such tests.
    """
    for item in items:
        needed = {name for marker in item.iter_markers("extras") for name in marker.args}
        if missing := sorted(name for name in needed if find_spec(name) is None):
            reason = f"needs {', '.join(missing)}: `make test-extras` or `make test-streams` installs it"
            item.add_marker(pytest.mark.skip(reason=reason))
    for marker, needed in (("gpu", 1), ("gpu2", 2)):
        chosen = [item for item in items if item.get_closest_marker(marker)]
        if chosen and (found := _cuda_devices()) < needed:
            for item in chosen:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), torch finds {found}"))


def _cuda_devices() -> int:
    import torch

    return torch.cuda.device_count()


def _own_servers() -> set[int | None]:
    """The process ids of multiprocessing's fork server and resource tracker, which live as long as the session."""
    return {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _children() -> list[psutil.Process]:
    """The processes below this one; psutil would look at every process of the machine, twice for each test."""
    found, servers = [], _own_servers()
    for pid in _below(os.getpid()):
        with contextlib.suppress(psutil.Error):
            if pid not in servers and _lives(child := psutil.Process(pid)):
                found.append(child)
    return found


def _below(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                yield child
                yield from _below(child)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _strays() -> list[psutil.Process]:
    """All processes that carry this session's mark, wherever they are in the process tree."""
    servers, found = _own_servers() | {os.getpid()}, []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid not in servers and process.environ().get(_MARK) == _SESSION and _lives(process):
                found.append(process)
    return found


@pytest.fixture(autouse=True)
def leaves_no_child() -> Iterator[None]:
    """Fail a test that leaves processes behind."""
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
    """Fail the session if any process with its mark outlives the tests, even one that has left the process tree."""
    yield
    deadline = time.monotonic() + _LEAVING_SECONDS
    while (left := _strays()) and time.monotonic() < deadline:
        time.sleep(0.1)
    described = [f"{process.pid}: {' '.join(_command(process))[:200]}" for process in left]
    for process in left:
        process.kill()
    assert not left, f"processes left behind by the test session: {described}"

"""How the tests run inside `make mutants`: a pytest plugin, for mutmut works in one process and the tests in several.

mutmut notes which test calls which function, then forks itself for every mutant and runs the tests of its function. A
process that a test starts must run the same mutant, end with the test, and its calls must be noted as well.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver, util
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from mutmut.state import state

from ddp_core.reduction import contiguous
from tests.support import processes

PR_SET_PDEATHSIG = 1

# The same examples for every mutant; none is made smaller, as only passing or failing matters.
settings.register_profile("mutants", derandomize=True, database=None, phases=[Phase.explicit, Phase.generate])
settings.load_profile("mutants")

# Torch's fork server would take seconds for every mutant. A fork of this process has the mutant, and torch already.
for module in forkserver._forkserver._preload_modules:
    importlib.import_module(module)
processes.CONTEXT = multiprocessing.get_context("fork")

# DDP reads the annotations behind mutmut's wrapper.
hook = contiguous._reduce_bucket
getattr(hook, "__wrapped__", hook).__annotations__ = hook.__annotations__

_REACHED = Path.cwd() / "reached"
"""Holds a file for each function that was called in a process which a test has started."""


class _Kept(set[str]):
    """A set that keeps at once what is added: a test may kill its process at any time, or limit the size of files."""

    def add(self, name: str) -> None:
        if name not in self:
            super().add(name)
            (_REACHED / name).touch()


def _notes_calls() -> bool:
    return os.environ.get("MUTANT_UNDER_TEST") == "stats"


def _begin_child(_: object) -> None:
    # pytest and mutmut catch what is printed; a test reads it from the file descriptors of the process it started.
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    if _notes_calls():
        _REACHED.mkdir(exist_ok=True)
        state()._stats = _Kept()


util.register_after_fork(processes, _begin_child)
# A mutant that runs out of time is killed, and with it whatever it has started.
os.register_at_fork(after_in_child=lambda: ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Note what the test's processes called, for all tests of the file: they may share the results of one run."""
    if not _notes_calls() or not _REACHED.exists():
        return
    for file in _REACHED.iterdir():
        for other in item.session.items:
            if other.path == item.path:
                state().tests_by_mangled_function_name[file.name].add(other.nodeid)
        file.unlink()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run quick tests first: the first that fails ends the mutant."""
    items.sort(key=lambda item: state().duration_by_test.get(item.nodeid, 0.0))

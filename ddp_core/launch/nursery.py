"""Worker processes without their start-up: forked from a process in which torch is loaded already.

A fresh interpreter spends seconds of processor time on importing torch and, with its first optimizer, torch._dynamo; on
a small machine that is most of what a restart after a fault takes. The nursery is forked from the launcher while that
has a single thread of Python, imports what a worker needs, and forks a worker per request in milliseconds. It never
touches a device: a CUDA driver that was initialised before a fork is lost to the child. All signals are blocked in it:
a scheduler sends its request to stop to every process at once, and workers that are to save need their parent.

Instead of this module, torch's agent was tried with a function as its entry point, `start_method="forkserver"` and
preloaded modules, in twelve turns: two workers took 1.0 times as long to their first step, a killed one 1.1 times as
long to be back. But a fork server is a fresh interpreter that loads torch once more, for 1.5 times the processor time
and 1.3 times the memory, so that three nodes on one machine of two cores started 1.4 times as late. Also, its processes
can be reached only by private names of torch and of Python, and a killed launcher leaves warnings on the terminal.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from ddp_core.base.process import die_with_parent
from ddp_core.base.torch_internals import starting_workers_by
from ddp_core.distributed.stop import die_when_asked
from ddp_core.model.optimizers import load_for_optimizers

Entry = Callable[[Sequence[str]], int]

# What a worker needs before its first step, beside the modules that the launcher has loaded.
_NEEDED = (
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.nn.parallel",
    "ddp_core.run.run",
    "ddp_core.trainers.distributed",
    # What a worker that replaces a lost one has to do with the run so far.
    "ddp_core.record.changes",
)
_POLL_SECONDS = 0.01
_LEAVING_SECONDS = 5.0
_FORK = multiprocessing.get_context("fork")


class Nursery:
    """Starts `entry(words)` in processes of their own. Use as a context manager; all of them end with it."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._forked: dict[int, ForkedWorker] = {}
        self._requests = itertools.count()

    def __enter__(self) -> Nursery:
        self._channel, other_end = _FORK.Pipe()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        words = (other_end, self._channel, self._entry, mask)
        self._process = _FORK.Process(target=_nurse, args=words, daemon=False)
        try:
            # The child inherits that all signals are blocked, so that none can reach it before it has begun.
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        other_end.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        """The process number: that of the parent of all workers."""
        return self

    def __exit__(self, *details: object) -> None:
        self._channel.close()
        self._process.join(_LEAVING_SECONDS)
        self._process.kill()
        self._process.join()

    def start(self, words: Sequence[str], environment: Mapping[str, str]) -> ForkedWorker:
        """A process that runs `entry(words)` and ends with the code that this returns. Raises OSError."""
        request = next(self._requests)
        try:
            self._channel.send((request, list(words), dict(environment)))
            while True:
                pid, code, begun = self._channel.recv()
                if begun == request:
                    self._forked[pid] = ForkedWorker(pid, self)
                    return self._forked[pid]
                self._ended(pid, code)
        except EOFError:
            raise BrokenPipeError("the nursery is gone") from None

    def listen(self) -> None:
        """Note which processes have ended."""
        try:
            while self._channel.poll():
                pid, code, _ = self._channel.recv()
                self._ended(pid, code)
        except (EOFError, OSError):
            for pid in list(self._forked):
                self._ended(pid, -signal.SIGKILL)

    def _ended(self, pid: int, code: int | None) -> None:
        # A handler of a signal that raised during `start` has left there a process that nobody knows: what is told of
        # it, its beginning (no code) and its end, is passed over.
        if code is not None and (worker := self._forked.get(pid)) is not None:
            worker.returncode = code
            del self._forked[pid]


class ForkedWorker:
    """A process that the nursery has started, as the launcher needs a Popen, and torch's agent a SubprocessHandler."""

    def __init__(self, pid: int, nursery: Nursery) -> None:
        self.pid = pid
        """Also the number of its process group."""
        self.returncode: int | None = None
        self._nursery = nursery

    @property
    def proc(self) -> ForkedWorker:
        return self

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Signal the whole process group, as torch's does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, death_sig or signal.SIGTERM)

    def poll(self) -> int | None:
        """The exit code, minus the signal's number where one has killed it; None while it runs."""
        if self.returncode is None:
            self._nursery.listen()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code once it has ended. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("worker", timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        """Send the signal; does nothing where the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, from any thread."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _nurse(channel: Connection, launchers_end: Connection, entry: Entry, mask: set[signal.Signals]) -> None:
    launchers_end.close()
    _begin("ddp-nursery")
    load_for_optimizers()
    for module in _NEEDED:
        importlib.import_module(module)
    gc.collect()
    # What is loaded is not garbage. If the collector looked at it, every worker would copy every page of it.
    gc.freeze()
    children: dict[int, multiprocessing.process.BaseProcess] = {}
    while True:
        wait([channel, *(child.sentinel for child in children.values())])
        for pid, child in list(children.items()):
            if child.exitcode is not None:
                _tell(channel, pid, child.exitcode, None)
                del children[pid]
        if channel.poll():
            try:
                request, words, environment = channel.recv()
            except (EOFError, OSError):
                # The launcher is done or gone; whatever still runs dies with this process.
                os._exit(0)
            child = _FORK.Process(target=_work, args=(channel, entry, mask, words, environment))
            child.start()
            assert child.pid is not None
            children[child.pid] = child
            _tell(channel, child.pid, None, request)


def _tell(channel: Connection, pid: int, code: int | None, begun: int | None) -> None:
    """Tell the launcher that a process has ended with a code, or which request it has begun for."""
    with contextlib.suppress(OSError):
        channel.send((pid, code, begun))


def _work(
    channel: Connection, entry: Entry, mask: set[signal.Signals], words: list[str], environment: dict[str, str]
) -> None:
    channel.close()
    _begin(f"ddp-rank-{environment.get('RANK', '?')}")
    # The launcher's handlers are not for its children. A request to stop that came since the fork takes effect now.
    die_when_asked()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.environ.clear()
    os.environ.update(environment)
    sys.exit(entry(words))


def _begin(name: str) -> None:
    """Leave the launcher's session, die with the parent, and be `name` (15 characters at most) in `ps` and `top`."""
    # So a terminal's signals go to the launcher alone, which passes them on.
    os.setsid()
    parent = multiprocessing.parent_process()
    die_with_parent()
    if parent is None or os.getppid() != parent.pid:
        os._exit(1)
    PR_SET_NAME = 15
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def started_by(
    nursery: Nursery | None, more: Callable[[Mapping[str, str]], Mapping[str, str]] = lambda _: {}
) -> contextlib.AbstractContextManager[None]:
    """While in the block, the nursery, if any, starts torch's workers; `more` gives further variables for each."""

    def start(usual: Callable[..., Any], *, args: tuple[str, ...], env: dict[str, str], **others: Any) -> Any:
        _, _, *words = args  # -m PACKAGE
        env = {**env, **more(env)}
        if nursery is None:
            return usual(args=args, env=env, **others)
        try:
            return nursery.start(words, {**os.environ, **env})
        except OSError:
            # The nursery was killed, perhaps because memory ran out.
            return usual(args=args, env=env, **others)

    return starting_workers_by(start)

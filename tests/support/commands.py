"""Starts `ddp` for tests: quickly, in a fork of a server that has torch loaded, or as a user does."""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from ddp_core.numerics.limits import LIMITS
from ddp_core.record.directory import RunDirectory, find_runs
from tests.support.processes import CONTEXT, HANG, run_processes
from tests.support.standin_cuda.installing import VARIABLE, install

ROOT = Path(__file__).parents[2]
MARK = "DDP_TEST_MARK"
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def search_path(*more: str) -> str:
    """PYTHONPATH of a command: it finds `more`, what this process finds by it, and this tree."""
    return os.pathsep.join(filter(None, [*more, os.environ.get("PYTHONPATH"), str(ROOT)]))


def without_limits() -> dict[str, str]:
    """This process's environment without the limits of portable numerics, as a user's shell has it; finds ddp_core."""
    return {name: value for name, value in os.environ.items() if name not in LIMITS} | {"PYTHONPATH": search_path()}


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, and its text on standard output and standard error."""

    code: int
    output: str
    errors: str


class Forked:
    """A `ddp` that runs in a fork of the server."""

    def __init__(self, process: multiprocessing.process.BaseProcess, scratch: Path, words: Sequence[str]) -> None:
        self._process, self._scratch, self._words = process, scratch, words
        assert process.pid is not None
        self.pid = process.pid
        """The process id, which is also the id of its process group."""

    def end(self, timeout: float = HANG) -> Ended:
        """Wait for the command to end. Raises AssertionError after `timeout` seconds."""
        self._process.join(timeout)
        code = self._process.exitcode
        output, errors = self.said()
        assert code is not None, f"ddp {' '.join(self._words)} still runs after {timeout} s:\n{output}\n{errors}"
        return Ended(code, output, errors)

    def said(self) -> tuple[str, str]:
        """What the command has written until now, to standard output and to standard error."""
        output, errors = ((self._scratch / name).read_text() for name in ("output", "errors"))
        return output, errors

    @property
    def lives(self) -> bool:
        """Whether the command still runs."""
        return self._process.is_alive()


def forked(
    *words: object, env: Mapping[str, str] | None = None, module: str = "ddp_core.cli"
) -> contextlib.AbstractContextManager[Forked]:
    """As `forked_as`, without more methods."""
    return forked_as(Forked, *words, env=env, module=module)


AnyForked = TypeVar("AnyForked", bound=Forked)


@contextlib.contextmanager
def forked_as(
    kind: type[AnyForked], *words: object, env: Mapping[str, str] | None = None, module: str = "ddp_core.cli"
) -> Iterator[AnyForked]:
    """Run `ddp WORDS`, or the `main` of another `module`, in a fork of the server, where torch is already loaded.

    The command is killed when the block ends. Raises AssertionError if it leaves a process behind.
    """
    with tempfile.TemporaryDirectory(prefix="ddp-test-") as scratch, _marked(env) as settings:
        for name in ("output", "errors"):
            (Path(scratch) / name).touch()
        plain = [str(word) for word in words]
        child = CONTEXT.Process(target=_enter, args=(module, plain, settings, scratch))
        child.start()
        try:
            yield kind(child, Path(scratch), plain)
        finally:
            if child.is_alive():
                child.kill()
            child.join()


def ddp(
    *words: object, timeout: float = HANG, env: Mapping[str, str] | None = None, module: str = "ddp_core.cli"
) -> Ended:
    """Run a command as `forked` does; return how it ended. Raises AssertionError after `timeout` seconds."""
    with forked(*words, env=env, module=module) as started:
        return started.end(timeout)


def command(
    *words: str | Path,
    timeout: float = HANG,
    env: Mapping[str, str] | None = None,
    program: Sequence[str] = ("-m", "ddp_core"),
    cwd: Path = ROOT,
) -> Ended:
    """Run `python -m ddp_core WORDS`, or another `program`, as a user does; return how it ended.

    Raises subprocess.TimeoutExpired after `timeout` seconds, and AssertionError if it leaves a process behind.
    """
    with running(*words, env=env, program=program, cwd=cwd) as process:
        output, errors = process.communicate(timeout=timeout)
        return Ended(process.returncode, output, errors)


def ran(
    *words: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None, timeout: float = HANG
) -> subprocess.CompletedProcess[str]:
    """How any program ended, and what it said. Raises subprocess.TimeoutExpired after `timeout` seconds."""
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False)


@contextlib.contextmanager
def running(
    *words: str | Path,
    env: Mapping[str, str] | None = None,
    program: Sequence[str] = ("-m", "ddp_core"),
    cwd: Path = ROOT,
) -> Iterator[subprocess.Popen[str]]:
    """Start what `command` runs, and yield the process; it is killed when the block ends.

    Raises AssertionError if the command leaves a process behind.
    """
    with _marked(env) as settings:
        process = subprocess.Popen(
            [sys.executable, *program, *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env=settings,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()


def trained(output: Path) -> tuple[RunDirectory, dict[str, Any]]:
    """The directory and the record of the one run below `output`."""
    ((directory, record),) = find_runs(output)
    return directory, dict[str, Any](record)


def train(output: Path, *words: str | Path, ranks: int = 0) -> dict[str, Any]:
    """Train in one process, or as `ranks` workers of an outside launcher; return the record.

    Raises AssertionError if the training does not end with 0.
    """
    full = ["train", *map(str, words), "--device", "cpu", "--output", str(output)]
    for ended in run_workers([*full, "--layout", "ddp"], ranks) if ranks else [ddp(*full)]:
        assert ended.code == 0, ended.errors
    return trained(output)[1]


Prepare = Callable[[int], None]


def run_workers(words: list[str], ranks: int, prepare: Prepare | None = None) -> list[Ended]:
    """Run `ddp WORDS` as every rank of an outside launcher; return how each ended.

    `prepare(rank)` runs in each rank's process before the command.
    """
    with tempfile.TemporaryDirectory(prefix="ddp-test-") as scratch:
        codes = run_processes(_work, ranks, words, scratch, prepare)
        said = [[(Path(scratch) / f"{name}-{rank}").read_text() for name in ("out", "err")] for rank in range(ranks)]
    return [Ended(code, output, errors) for code, (output, errors) in zip(codes, said, strict=True)]


def wait_until(condition: Callable[[], bool], timeout: float, what: str, pause: float = 0.01) -> None:
    """Poll until the condition holds, every `pause` seconds. Raises AssertionError after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(pause)


def _work(rank: int, world_size: int, words: list[str], scratch: str, prepare: Prepare | None) -> int:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{scratch}/{name}-{rank}", os.O_WRONLY | os.O_CREAT), number)
    if prepare is not None:
        prepare(rank)
    from ddp_core.cli import main

    return main(words)


def _enter(module: str, words: list[str], settings: dict[str, str], scratch: str) -> None:
    gc.freeze()
    os.setsid()
    os.environ.clear()
    os.environ.update(settings)
    if VARIABLE in settings:
        install(int(settings[VARIABLE]))
    os.chdir(ROOT)
    for number, name in ((1, "output"), (2, "errors")):
        descriptor = os.open(Path(scratch) / name, os.O_WRONLY)
        os.dup2(descriptor, number)
        os.close(descriptor)
    # A child of the fork server would start its own children from a server, too. A real command starts them in the
    # platform's default way.
    multiprocessing.set_start_method(None, force=True)
    # multiprocessing's children ignore SIGINT, which a terminal sends on Ctrl-C, and what a tester starts with nohup
    # ignores SIGHUP. A command that a user types into a terminal ignores neither.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Called without an argument, `main` reads sys.argv, and takes it that this process ends with the command.
    sys.argv = [module, *words]
    main = importlib.import_module(module).main
    code = main() if module == "ddp_core.cli" else main(words)
    sys.stdout.flush()
    sys.exit(code)


@contextlib.contextmanager
def _marked(env: Mapping[str, str] | None) -> Iterator[dict[str, str]]:
    """An environment without a launcher's variables, with a mark by which all descendants can be found.

    Kills at the end what carries the mark. Raises AssertionError if it had to, unless the block has already failed.
    """
    mark = uuid.uuid4().hex
    # The image names its folders by DDP_OUTPUT and DDP_DATA; a test names its own.
    others = (*LAUNCHER_VARIABLES, "DDP_OUTPUT", "DDP_DATA")
    clean = {name: value for name, value in os.environ.items() if name not in others}
    added = dict(env or {})
    places = {"PYTHONPATH": search_path(added.get("PYTHONPATH", ""))}
    settings = clean | {"OMP_NUM_THREADS": "1", MARK: mark} | added | places
    failed = True
    try:
        yield settings
        failed = False
    finally:
        left = _left(mark)
        words = list(map(_described, left))
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        assert failed or not left, f"processes left: {words}"


def _left(mark: str, patience: float = 10.0) -> list[psutil.Process]:
    """The processes with the mark that have not ended after `patience` seconds.

    A killed process takes a moment to end. torch's loader processes look every five seconds whether their parent lives.
    """
    deadline = time.monotonic() + patience
    while (found := list(_with(mark))) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def _with(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                yield process


def _described(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return f"{process.pid}: gone"

"""How `make mutants` runs tests: a pytest plugin that has collected them once and forks itself for every mutant.

The fork puts the code of the changed function in place of the function's own and runs, one after the other, the tests
that call the function, until one fails. Processes that a test starts are forks as well, so that they run the mutant.
Which test calls which function, and how long it takes, is recorded before, by files of tests, and kept in the folder
`mutants/` until a file of either changes.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import functools
import gc
import hashlib
import importlib
import json
import multiprocessing
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import psutil
import pytest
from hypothesis import Phase, settings

from benchmarks.mutations import ROOT, Function, Mutant, functions_of, test_digest, text_of
from tests.support import processes

RECORDED = ROOT / "mutants" / "recorded.json"
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PATIENCE, SLACK = 8, 10
"""A test is out of time after PATIENCE times the seconds it takes without a mutant, and SLACK seconds more."""
IDLE_PATIENCE, IDLE_SLACK, IDLE_SHARE = 3, 2.5, 0.01
"""And after so many if its processes have used no more of a core than this share for IDLE_SLACK seconds: they hang."""
RECORDING_SECONDS = 1800
_PASSED, _FAILED, _BROKEN = 0, 1, 2


@dataclass
class Child:
    """A fork that runs tests and says which it has begun."""

    pid: int
    ended: int
    """Its pidfd."""
    says: int
    """The pipe that tells the number of each test that begins."""
    tests: list[tuple[str, float]]
    """With the seconds that each takes without a mutant."""
    done: Callable[[str, str | None], None]
    """Is told `survived`, `killed`, `timeout` or `error`, and the test that decided."""
    folder: Path
    test: int = -1
    """The number of the test that runs."""
    began: float = field(default_factory=time.monotonic)
    """When the test did."""
    busy: float = 0.0
    """Until when it was seen to use the processor."""
    used: float = 0.0
    """Seconds of processor time, at that time."""

    def begins(self, test: int) -> None:
        """The next test has begun."""
        self.test, self.began = test, time.monotonic()
        self.busy = self.began

    def is_out_of_time(self) -> bool:
        """Whether its test takes too long."""
        now = time.monotonic()
        seconds = self.tests[self.test][1] if self.test >= 0 else 0.0
        took = now - self.began
        if took < IDLE_PATIENCE * seconds + IDLE_SLACK:
            return False
        used = self._seconds_of_processors()
        if abs(used - self.used) > IDLE_SHARE * (now - self.busy):
            self.used, self.busy = used, now
        return now - self.busy > IDLE_SLACK or took > PATIENCE * seconds + SLACK

    def _seconds_of_processors(self) -> float:
        own, total = psutil.Process(self.pid), 0.0
        for process in [own, *own.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                total += sum(process.cpu_times()[:2])
        return total


class Runner:
    """The plugin: runs the mutants that it is given, and reports the outcome of each as it comes."""

    def __init__(
        self,
        mutants: Iterable[Mutant],
        files: list[str],
        killers: dict[tuple[str, str], Counter[str]],
        done: Callable[[Mutant, str, str | None], None],
        jobs: int,
        test_seconds: float,
        deadline: float,
    ) -> None:
        """`mutants`: asked for one after the other. `killers`: which test has killed how many of a function before."""
        self._mutants, self._files, self._killers, self._done = mutants, files, killers, done
        self._jobs, self._test_seconds, self._deadline = jobs, test_seconds, deadline
        self._near: dict[str, Counter[str]] = defaultdict(Counter)
        for (file, _), counts in killers.items():
            self._near[file].update(counts)
        self._children: list[Child] = []
        self._calls: dict[str, list[tuple[str, float]]] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Instead of running the tests: record them where that is needed, then run the mutants."""
        self._session = session
        self._items = {item.nodeid: item for item in session.items}
        # Read now: what changes while this runs is not what runs.
        for name in self._items:
            test_digest(name)
        _get_ready()
        self._own = {psutil.Process().pid, *(child.pid for child in psutil.Process().children())}
        self._functions = functions_in(self._files)
        gc.collect()
        gc.freeze()
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            self._folder = Path(folder)
            self._calls = self._recorded()
            for mutant in self._mutants:
                if time.monotonic() > self._deadline:
                    break
                self._begin(mutant)
            self._wait_for(0)
        return True

    def _begin(self, mutant: Mutant) -> None:
        self._wait_for(self._jobs - 1)
        function = mutant.function
        tests = self._tests_of(function)
        if not tests:
            self._done(mutant, "not covered", None)
            return

        def done(outcome: str, test: str | None) -> None:
            if test is not None:
                self._killers.setdefault((function.file, function.name), Counter())[test] += 1
                self._near[function.file][test] += 1
            self._done(mutant, outcome, test)

        self._fork(tests, done, functools.partial(self._run, mutant))

    def _tests_of(self, function: Function) -> list[tuple[str, float]]:
        """The tests that call the function, those first that kill most in a second; no more than time allows."""
        kills = self._killers.get((function.file, function.name), Counter())
        near = self._near[function.file]
        found = self._calls.get(f"{function.file}::{function.name}", [])
        chosen: list[tuple[str, float]] = []
        total = 0.0
        for name, seconds in sorted(found, key=lambda each: each[1] / (1 + 20 * kills[each[0]] + near[each[0]])):
            total += seconds
            if chosen and total > self._test_seconds:
                break
            chosen.append((name, seconds))
        return chosen

    def _apply(self, mutant: Mutant) -> None:
        function, path = mutant.function, str(ROOT / mutant.function.file)
        changed = _codes(compile(mutant.text, path, "exec", dont_inherit=True))[function.name, function.line]
        for own in self._functions[function.file, function.name]:
            # Without its super(), a method needs no cell of its class any more, but its function has one.
            cells = own.__code__.co_freevars
            own.__code__ = changed if changed.co_freevars else changed.replace(co_freevars=cells)
            if function.line + mutant.change()[0] < function.body:
                _change_defaults(own, mutant, path)

    def _fork(
        self,
        tests: list[tuple[str, float]],
        done: Callable[[str, str | None], None],
        work: Callable[[list[str], int], int],
    ) -> None:
        says, said = os.pipe()
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        sys.stdout.flush()
        if pid := os.fork():
            os.close(said)
            self._children.append(Child(pid, os.pidfd_open(pid), says, tests, done, folder))
            return
        code = _BROKEN
        try:
            os.close(says)
            self._settle(folder)
            code = work([name for name, _ in tests], said)
        finally:
            os._exit(code)

    def _settle(self, folder: Path) -> None:
        """What the fork needs of its own: a session, orphans, a folder for files, and no output."""
        os.setsid()
        # What its processes leave behind becomes its own child, as in the tests' own process, and then this one's.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        paths: Any = self._session.config._tmp_path_factory  # type: ignore[attr-defined]
        paths._given_basetemp, paths._basetemp = folder / "tmp", None

    def _run(self, mutant: Mutant, tests: list[str], said: int) -> int:
        self._apply(mutant)
        for number, name in enumerate(tests):
            os.write(said, number.to_bytes(2))
            item = self._items[name]
            # The last one is followed by itself: what a whole session ends with is no business of a mutant.
            following = self._items[tests[min(number + 1, len(tests) - 1)]]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self._session.testsfailed:
                return _FAILED
        return _PASSED

    def _wait_for(self, most: int) -> None:
        """Until no more than so many forks are left."""
        while len(self._children) > most:
            waiting = select.poll()
            for child in self._children:
                waiting.register(child.ended, select.POLLIN)
                waiting.register(child.says, select.POLLIN)
            ready = {number for number, _ in waiting.poll(1000)}
            for child in list(self._children):
                if child.says in ready and (told := os.read(child.says, 1024)):
                    child.begins(int.from_bytes(told[-2:]))
                elif child.ended in ready:
                    code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
                    self._end(child, {_PASSED: "survived", _BROKEN: "error"}.get(code, "killed"))
                elif child.is_out_of_time():
                    os.kill(child.pid, signal.SIGKILL)
                    os.waitpid(child.pid, 0)
                    self._end(child, "timeout")

    def _end(self, child: Child, outcome: str) -> None:
        self._children.remove(child)
        os.close(child.ended)
        os.close(child.says)
        _end_orphans(self._own | {other.pid for other in self._children})
        decided = child.tests[child.test][0] if outcome in ("killed", "timeout") and child.test >= 0 else None
        child.done(outcome if decided or outcome == "survived" else "error", decided)
        shutil.rmtree(child.folder, ignore_errors=True)

    def _recorded(self) -> dict[str, list[tuple[str, float]]]:
        """For each function the tests that call it, with their seconds; tests that fail without a mutant are left out.

        A file of tests is recorded anew when it, or a file of code that it called, has changed.
        """
        kept: dict[str, Any] = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
        files: dict[str, list[str]] = defaultdict(list)
        for name in self._items:
            files[name.partition("::")[0]].append(name)
        for file, tests in files.items():
            if file not in kept or kept[file]["digest"] != _digest([file, *kept[file]["files"]]):
                self._wait_for(self._jobs - 1)
                self._record(file, tests, kept)
        self._wait_for(0)
        calls = defaultdict(list)
        failed = []
        for file in files:
            for name, (seconds, passed, functions) in kept[file]["tests"].items():
                if not passed:
                    failed.append(name)
                elif name in self._items:
                    for function in functions:
                        calls[function].append((name, seconds))
        if failed:
            print(f"mutants: left out, as they fail without one: {', '.join(failed)}", file=sys.stderr, flush=True)
        return calls

    def _record(self, file: str, tests: list[str], kept: dict[str, Any]) -> None:
        target = self._folder / f"{len(list(self._folder.iterdir()))}.calls"

        def done(outcome: str, test: str | None) -> None:
            recorded = _calls_by_test(target, [self._items[name] for name in tests])
            called = sorted({function.partition("::")[0] for _, _, every in recorded.values() for function in every})
            kept[file] = {"digest": _digest([file, *called]), "files": called, "tests": recorded}
            RECORDED.parent.mkdir(exist_ok=True)
            RECORDED.write_text(json.dumps(kept))
            print(f"mutants: recorded {file}", file=sys.stderr, flush=True)

        def work(names: list[str], said: int) -> int:
            recording = Recording(target, self._functions)
            self._session.config.pluginmanager.register(recording)
            return recording.run([self._items[name] for name in names], said)

        self._fork([(name, RECORDING_SECONDS) for name in tests], done, work)


class Recording:
    """Writes which functions are called, by test and by fixture, also in forks, and how long each test takes."""

    def __init__(self, target: Path, functions: dict[tuple[str, str], list[FunctionType]]) -> None:
        # A code object's own hash is one over all that it consists of.
        self._names = {
            id(own.__code__): f"{file}::{name}" for (file, name), every in functions.items() for own in every
        }
        self._target = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._places = [""]
        self._seen: set[tuple[str, str]] = set()
        self._pid = os.getpid()
        self._passed = True
        self._unwritten = b""

    def run(self, items: list[Any], said: int) -> int:
        """Run all tests of a file, also after one has failed."""
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        for number, (item, following) in enumerate(zip(items, [*items[1:], items[-1]], strict=True)):
            os.write(said, number.to_bytes(2))
            self._places, self._passed = [item.nodeid], True
            began = time.monotonic()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            self._write("=", item.nodeid, f"{time.monotonic() - began:.3f} {int(self._passed)}")
        return _PASSED

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        """What a fixture calls belongs to every test that uses it."""
        self._places.append(f"fixture {fixturedef.baseid} {fixturedef.argname}")
        try:
            return (yield)
        finally:
            self._places.pop()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failure."""
        self._passed = self._passed and not report.failed

    def _trace(self, frame: FrameType, event: str, arg: object) -> None:
        name = self._names.get(id(frame.f_code))
        if name is not None:
            # A fork has the state of its test. What it calls may serve other tests of the file.
            place = self._places[-1] if os.getpid() == self._pid else "*"
            if (place, name) not in self._seen:
                self._seen.add((place, name))
                self._write("+", place, name)

    def _write(self, kind: str, place: str, what: str) -> None:
        self._unwritten += f"{kind}\t{place}\t{what}\n".encode()
        # A fork may be killed at any time; the test itself may limit the size of files until it ends.
        if kind == "=" or os.getpid() != self._pid:
            os.write(self._target, self._unwritten)
            self._unwritten = b""


def _calls_by_test(recorded: Path, items: list[Any]) -> dict[str, tuple[float, bool, list[str]]]:
    """The seconds of each test that came to its end, whether it passed, and the functions that it calls."""
    places: dict[str, set[str]] = defaultdict(set)
    ends: dict[str, tuple[float, bool]] = {}
    for line in recorded.read_text().splitlines() if recorded.exists() else []:
        kind, place, what = line.split("\t")
        if kind == "+":
            places[place].add(what)
        else:
            ends[place] = float(what.split()[0]), what.endswith(" 1")
    found = {}
    for item in items:
        if item.nodeid in ends:
            calls = places[item.nodeid] | places["*"]
            for fixtures in item._fixtureinfo.name2fixturedefs.values():
                for fixture in fixtures:
                    calls |= places[f"fixture {fixture.baseid} {fixture.argname}"]
            seconds, passed = ends[item.nodeid]
            if _remembers(item.module):
                calls = set().union(*places.values())
                seconds = max(each for each, _ in ends.values())
            found[item.nodeid] = seconds, passed, sorted(calls)
    return found


def _remembers(module: Any) -> bool:
    """Whether one test of a file may look at what another one has computed."""
    return any(
        isinstance(value, functools._lru_cache_wrapper) and value.__module__.startswith("tests")
        for value in vars(module).values()
    )


def _get_ready() -> None:
    """What every fork needs is loaded once; what they start are forks, which end with them."""
    for module in forkserver._forkserver._preload_modules:  # type: ignore[attr-defined]
        importlib.import_module(module)
    processes.CONTEXT = multiprocessing.get_context("fork")  # type: ignore[assignment]
    resource_tracker.ensure_running()
    os.register_at_fork(after_in_child=lambda: ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL))
    # The same examples for every mutant; none is made smaller, as only passing or failing matters.
    settings.register_profile("mutants", derandomize=True, database=None, phases=[Phase.explicit, Phase.generate])
    settings.load_profile("mutants")


def functions_in(files: list[str]) -> dict[tuple[str, str], list[FunctionType]]:
    """The function objects of each function, wherever decorators have put them."""
    for file in files:
        importlib.import_module(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
    names = {
        (str(ROOT / file), function.name, function.line): (file, function.name)
        for file in files
        for function in functions_of(file).values()
    }
    found = defaultdict(list)
    for each in gc.get_objects():
        if type(each) is FunctionType:
            code = each.__code__
            if name := names.get((code.co_filename, code.co_qualname, code.co_firstlineno)):
                found[name].append(each)
    return found


def _codes(code: CodeType) -> dict[tuple[str, int], CodeType]:
    found: dict[tuple[str, int], CodeType] = {}
    for each in code.co_consts:
        if isinstance(each, CodeType):
            found |= {(each.co_qualname, each.co_firstlineno): each, **_codes(each)}
    return found


def _defaults(text: str, function: Function) -> dict[int | str, ast.expr]:
    """The default values of a function's arguments, by their place from the end, or by name."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first == function.line:
                by_name = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                return {
                    **{number - len(node.args.defaults): each for number, each in enumerate(node.args.defaults)},
                    **{argument.arg: default for argument, default in by_name if default is not None},
                }
    return {}


def _change_defaults(own: FunctionType, mutant: Mutant, path: str) -> None:
    before, after = (_defaults(text, mutant.function) for text in (text_of(mutant.function.file), mutant.text))
    for place in before.keys() & after.keys():
        if ast.dump(before[place]) != ast.dump(after[place]):
            value = eval(compile(ast.Expression(after[place]), path, "eval"), own.__globals__)
            if isinstance(place, str):
                own.__kwdefaults__ = {**(own.__kwdefaults__ or {}), place: value}
            else:
                given = list(own.__defaults__ or ())
                given[place] = value
                own.__defaults__ = tuple(given)


def _digest(files: list[str]) -> str:
    return hashlib.sha256("\n".join(text_of(file) for file in files).encode()).hexdigest()


def _end_orphans(others: set[int]) -> None:
    """End what a fork has left behind: with its end it became a child of this process."""
    for pid in {int(pid) for tasks in Path("/proc/self/task").glob("*/children") for pid in tasks.read_text().split()}:
        if pid not in others:
            with contextlib.suppress(psutil.Error):
                child = psutil.Process(pid)
                for process in [*child.children(recursive=True), child]:
                    process.kill()
                child.wait()

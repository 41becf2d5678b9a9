"""A reader that has gone, a terminal that knows few letters, a container without an init: none ends a command.

The memory of a process, and the thread in which it drops a process group.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from ddp_core.base.process import let_go
from ddp_core.cli import main
from tests.faults.matrix import record_row
from tests.support.commands import ROOT, command, ran, trained
from tests.support.processes import HANG, ask

TRAIN = ["train", "toy_mlp", "--device", "cpu", "--set", "epochs=3"]
SPEAKS = '''
"""Speaks it of itself?"""
from ddp_core.config.experiment import *
from größe import WIDTH
from torch import nn
def model():
    print("Größe " * 20000, flush=True)
    return nn.Linear(10, WIDTH)
experiment = Experiment(name="speaks", model=Component(name="model"), data=Component(name="toy_data"),
                        loss="mean_squared_error", global_batch_size=16, micro_batch=4)
'''


def without_reader(words: list[str]) -> int:
    """The exit code of `ddp WORDS`; all that it prints goes to a pipe that nobody reads."""
    os.chdir(ROOT)
    # A daemon may have no children, and a real command is none.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    multiprocessing.set_start_method(None, force=True)
    reader, writer = os.pipe()
    os.close(reader)
    for number in (1, 2):
        os.dup2(writer, number)
    return main(words)


@pytest.mark.parametrize("words", [["list"], ["--help"], ["train", "--help"]], ids=" ".join)
def test_a_command_ends_quietly_when_its_reader_has_gone(words: list[str]) -> None:
    assert ask(without_reader, words) == 0


@pytest.mark.parametrize(
    "layout",
    [
        [],
        pytest.param(["--layout", "ddp", "--nproc-per-node", "2"], marks=pytest.mark.slow),
    ],
    ids=["single", "torchrun"],
)
def test_a_training_goes_on_without_a_reader(tmp_path: Path, layout: list[str]) -> None:
    assert ask(without_reader, [*TRAIN, *layout, "--output", str(tmp_path)]) == 0
    directory, record = trained(tmp_path)
    assert (record["status"], record["exit_code"]) == ("completed", 0)
    log = directory.log.read_text()
    assert all(words in log for words in ("epoch   3", "done: ", record["weights_sha256"])), "the log has it all"


def test_what_an_experiment_prints_itself_does_not_end_it_either(tmp_path: Path) -> None:
    folder = tmp_path / "Übung"
    folder.mkdir()
    (folder / "größe.py").write_text("WIDTH = 1\n")
    (folder / "spät.py").write_text(SPEAKS, encoding="utf-8")
    words = ["train", str(folder / "spät.py"), "--device", "cpu", "--output", str(tmp_path / "out")]
    assert ask(without_reader, words) == 0


def test_a_command_without_streams_works() -> None:
    words = " ".join([sys.executable, "-m", "ddp_core", "list"])
    settings = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(["sh", "-c", f"{words} >&- 2>&-"], cwd=ROOT, env=settings, timeout=HANG, check=False)
    assert done.returncode == 0


@pytest.mark.full
@pytest.mark.parametrize(
    ("program", "first"), [("ddp_core train --help", "Usage: ddp train"), ("ddp_lab.cluster -h", "")]
)
def test_a_reader_who_leaves_gets_what_he_wanted(program: str, first: str) -> None:
    """The interpreter flushes its streams once more when it ends, which must not complain either."""
    words = f"{sys.executable} -m {program}"
    settings = os.environ | {"PYTHONPATH": str(ROOT)}
    pipe = ["sh", "-c", f"({words}; echo $? >&2) | head -1"]
    done = subprocess.run(pipe, cwd=ROOT, env=settings, timeout=HANG, check=True, capture_output=True, text=True)
    assert done.stdout.startswith(first)
    assert (done.stdout.count("\n"), done.stderr) == (1, "0\n")


LOCALES = {
    "C": {"LC_ALL": "C"},
    "UTF-8": {"LC_ALL": "C.UTF-8"},
    "ASCII": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}
"""The last forbids Python to use UTF-8 all the same."""


@pytest.mark.slow
@pytest.mark.parametrize("locale", ["C", "UTF-8", "ASCII"])
def test_files_folders_and_modules_may_have_any_letter(tmp_path: Path, locale: str) -> None:
    # Python itself finds no module of such a name where it knows ASCII alone.
    text = SPEAKS.replace("20000", "1").replace("größe", "plain" if locale == "ASCII" else "größe")
    for name in ("größe", "plain"):
        (tmp_path / f"{name}.py").write_text("WIDTH = 1\n")
    (tmp_path / "spät.py").write_text(text, encoding="utf-8")
    output = tmp_path / "Ergebnisse für alle"
    ended = command("train", tmp_path / "spät.py", "--device", "cpu", "--output", output, env=LOCALES[locale])
    assert (ended.code, ended.errors) == (0, "")
    assert ("Gr\\xf6\\xdfe" if locale == "ASCII" else "Größe") in ended.output
    directory, record = trained(output)
    assert record["status"] == "completed"
    assert (directory.path / "source" / "spät.py").read_text(encoding="utf-8") == text
    assert "Ergebnisse für alle" in directory.log.read_text(encoding="utf-8")


CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
FIRST = """
import os, signal, sys, time
from pathlib import Path
from ddp_core.cli import main
sys.argv[1:] = ["no command"]
assert main() == 2
assert os.getpid() != 1
"""
ORPHAN = """
reader, writer = os.pipe()
if not os.fork():
    orphan = os.fork()
    os.write(writer, str(orphan).encode() if orphan else b"")
    os._exit(0)
place = Path("/proc", os.read(reader, 20).decode())
deadline = time.monotonic() + 60
while place.exists() and time.monotonic() < deadline:
    time.sleep(0.01)
sys.exit(1 if place.exists() else 7)
"""
LISTENS = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("listens", flush=True)
time.sleep(600)
"""


@pytest.fixture
def container() -> tuple[str, ...]:
    """The words before a command that is to be process 1."""
    if shutil.which("unshare") is None or subprocess.run([*CONTAINER, "true"], capture_output=True).returncode:
        pytest.skip("needs unshare, and the right to make namespaces")
    return (*CONTAINER, sys.executable, "-c")


def test_process_1_waits_for_what_is_orphaned(container: tuple[str, ...]) -> None:
    assert subprocess.run([*container, FIRST + ORPHAN], cwd=ROOT, timeout=HANG).returncode == 7


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 128 + signal.SIGUSR1)])
def test_process_1_passes_signals_on(container: tuple[str, ...], number: signal.Signals, code: int) -> None:
    with subprocess.Popen([*container, FIRST + LISTENS], cwd=ROOT, stdout=subprocess.PIPE) as outside:
        assert outside.stdout.readline() == b"listens\n"
        (first,) = psutil.Process(outside.pid).children()
        first.send_signal(number)
        assert outside.wait(HANG) == code
    record_row(36, f"{number.name}: {code}")


class Dropped:
    def __init__(self, dropped_in: queue.SimpleQueue[str]) -> None:
        self.dropped_in = dropped_in

    def __del__(self) -> None:
        self.dropped_in.put(threading.current_thread().name)


def test_a_group_is_dropped_in_a_thread_of_its_own() -> None:
    dropped_in: queue.SimpleQueue[str] = queue.SimpleQueue()
    let_go([Dropped(dropped_in)])
    assert dropped_in.get(timeout=HANG) == "parting"


FAULTS = """
import resource, sys, torch
from ddp_core.base.process import keep_freed_memory
print(sys.argv[1] == "keep" and keep_freed_memory())
for _ in range(20):
    torch.ones(10_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(10_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
def test_what_is_freed_is_used_again_without_page_faults() -> None:
    def run(argument: str) -> tuple[bool, int]:
        done = ran(sys.executable, "-c", FAULTS, argument, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        kept, faults = done.stdout.split()
        return kept == "True", int(faults)

    kept, faults = run("keep")
    if not kept:
        pytest.skip("this C library has no mallopt")
    _, faults_otherwise = run("leave")
    # A tensor of 40 MB has 9,766 pages of 4 KiB, and ten tensors are allocated.
    assert faults < 1000
    assert faults_otherwise > 10_000


RETURNED = """
import psutil, torch
from ddp_core.base.process import return_large_blocks
worked = return_large_blocks()
blocks = [torch.ones(elements) for _ in range(100) for elements in (70_000, 700)]
full = psutil.Process().memory_info().rss
del blocks[::2]  # a little of every page range is still in use
print(worked, full - psutil.Process().memory_info().rss)
"""


@pytest.mark.full
def test_large_blocks_go_back_to_the_kernel_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", RETURNED], capture_output=True, text=True, check=True, timeout=HANG)
    worked, returned = done.stdout.split()
    if worked != "True":
        pytest.skip("this C library has no mallopt")
    assert int(returned) > 0.9 * 100 * 70_000 * 4

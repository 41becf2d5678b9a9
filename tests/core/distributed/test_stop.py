"""A run that is asked to stop finishes its step, saves and exits with 75; resumed, it ends as if never stopped.

Tests distributed/reports.py, too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import psutil
import pytest

from ddp_core.base.errors import ExitCode, UserError
from ddp_core.checkpoint import newest_valid
from ddp_core.distributed import stop as stopping
from ddp_core.distributed.reports import read_reports, report_end
from ddp_core.distributed.world import World, free_port
from ddp_core.observe.metrics import read_metrics
from ddp_core.record.directory import find_runs
from tests.core.run.test_repeat import BEGIN
from tests.faults.matrix import record_row
from tests.support.commands import Forked, forked, running, train, trained, wait_until
from tests.support.layout_cases import ADAMW_MLP
from tests.support.processes import HANG

WORDS = (ADAMW_MLP, "--set", "max_steps=40", "--log-every", "1")
DDP = ("--layout", "ddp", "--nproc-per-node", "2")
Started = Forked | Popen[str]
Send = Callable[[Started, int], None]


def has_begun(output: Path) -> bool:
    """Whether a run below `output` has recorded a step."""
    return any('"kind": "step"' in file.read_text() for file in output.glob("*/*/metrics.jsonl"))


def to_the_command(started: Started, number: int) -> None:
    os.kill(started.pid, number)


def to_its_group(started: Started, number: int) -> None:
    """As a terminal does on Ctrl-C."""
    os.killpg(started.pid, number)


def to_every_process(started: Started, number: int) -> None:
    """As a scheduler does: to the launcher and all that it has started, the children first."""
    with contextlib.suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(started.pid)
        for process in [*reversed(launcher.children(recursive=True)), launcher]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    record = train(tmp_path_factory.mktemp("undisturbed"), *WORDS)
    return record["weights_sha256"], record["optimizer_sha256"]


def stop(output: Path, *words: str, number: int, send: Send) -> None:
    """Start a run, stop it after some steps, check what it leaves behind."""
    full = ["train", *WORDS, *words, "--device", "cpu", "--fault", "slow@1", "--output", output]
    with forked(*full) as started:
        wait_until(lambda: has_begun(output), HANG, "the first step")
        send(started, number)
        ended = started.end()
    assert ended.code == 75, ended.errors
    assert "Traceback" not in ended.errors
    directory, record = trained(output)
    assert (record["status"], record["exit_code"]) == ("stopped", 75)
    checkpoint = newest_valid(directory.checkpoints)
    assert f"stopped at step {checkpoint.step} ({stopping.describe_signal(number)})" in record["message"]
    assert 0 < checkpoint.step < 40
    assert read_metrics(directory.metrics, "step")[-1]["step"] == checkpoint.step, "steps after the save are lost"
    (line,) = ended.errors.splitlines()
    assert line.startswith("ddp: stopped: at step "), ended.errors
    assert "--resume auto" in line


DP = ("--layout", "dp")
EARLY = {number: ("--stop-signal", number.name) for number in (signal.SIGUSR1, signal.SIGUSR2)}


@pytest.mark.parametrize(
    ("layout", "number", "send"),
    [
        pytest.param(DDP, signal.SIGTERM, to_the_command, id="torchrun-SIGTERM-command", marks=pytest.mark.full),
        pytest.param(DDP, signal.SIGHUP, to_its_group, id="torchrun-SIGHUP-group", marks=pytest.mark.slow),
        pytest.param(DDP, signal.SIGTERM, to_every_process, id="torchrun-SIGTERM"),
        pytest.param(DDP, signal.SIGUSR2, to_every_process, id="torchrun-SIGUSR2", marks=pytest.mark.slow),
        pytest.param(DDP, signal.SIGINT, to_every_process, id="torchrun-SIGINT", marks=pytest.mark.slow),
        pytest.param((), signal.SIGINT, to_every_process, id="single-SIGINT", marks=pytest.mark.slow),
        pytest.param(DP, signal.SIGTERM, to_every_process, id="dp-SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_ends_elsewhere_as_if_nothing_had_happened(
    tmp_path: Path, undisturbed: tuple[str, str], layout: tuple[str, ...], number: signal.Signals, send: Send
) -> None:
    """A scheduler sends it to the launcher, the parent of its workers, the workers, and those that load their data."""
    words = ("--workers", "1") if send is to_every_process else ()
    stop(tmp_path, *layout, *words, *EARLY.get(number, ()), number=number, send=send)
    record = train(tmp_path, *WORDS, "--resume", "auto")
    assert record["status"] == "completed"
    assert (record["weights_sha256"], record["optimizer_sha256"]) == undisturbed
    if words:
        record_row(28, f"{number.name} to {' '.join(layout) or 'single'}, with loader processes: 75, saved")


SLOW_MODEL = """
import time

class Slow(nn.Linear):
    def forward(self, inputs):
        time.sleep(600)

def model():
    return Slow(8, 2)
"""
WAITING = """
import os, time
from pathlib import Path
if "RANK" in os.environ or WORLD == "alone":
    Path(PLACE).touch()
    time.sleep(600)
"""


@pytest.mark.parametrize("layout", [(), DDP])
def test_a_second_interrupt_leaves_at_once(tmp_path: Path, layout: tuple[str, ...]) -> None:
    (tmp_path / "slow.py").write_text(BEGIN + SLOW_MODEL)
    output = tmp_path / "out"
    with forked("train", tmp_path / "slow.py", *layout, "--device", "cpu", "--output", output) as started:
        wait_until(lambda: any(record for _, record in find_runs(output)), HANG, "the run's record")

        def has_left() -> bool:
            # Two signals that come before the process handles the first count as one, so it may take more than two.
            with contextlib.suppress(ProcessLookupError):
                to_its_group(started, signal.SIGINT)
            return not started.lives

        wait_until(has_left, HANG, "it leaves")
        ended = started.end()
    # The code 75 would come only after the step, which takes longer than a test may. A shell says 130, too, for an
    # interpreter that an interrupt ends while it is leaving.
    assert ended.code in (130, -signal.SIGINT)
    assert "Traceback" not in ended.errors, "many interrupts are no fault"
    record_row(29, f"once: 75, saved; more often: {ended.code} at once, no process left")


@pytest.mark.parametrize("number", [signal.SIGHUP, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("world", "layout"),
    [
        pytest.param("alone", (), id="single"),
        pytest.param("workers", DDP, id="torchrun"),
    ],
)
def test_a_request_before_the_first_step_ends_at_once(
    tmp_path: Path, world: str, layout: tuple[str, ...], number: int
) -> None:
    place = tmp_path / "begun"
    (tmp_path / "waiting.py").write_text(f"{BEGIN}\nWORLD, PLACE = {world!r}, {str(place)!r}\n{WAITING}")
    with forked("train", tmp_path / "waiting.py", *layout, "--device", "cpu", "--output", tmp_path / "out") as started:
        wait_until(place.exists, HANG, "the experiment's file is read")
        to_the_command(started, number)
        ended = started.end()
    assert ended.code == 75, ended.errors
    said = f"while nothing was trained ({stopping.describe_signal(number)}); continue with --resume auto"
    assert ended.errors == f"ddp: stopped: {said}\n"


def test_a_rank_that_waits_for_the_others_stops_at_once(tmp_path: Path) -> None:
    port, output = free_port(), tmp_path / "out"
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with forked("train", *WORDS, "--layout", "ddp", "--device", "cpu", "--output", output, env=place) as started:
        wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, HANG, "rank 0 waits")
        to_the_command(started, signal.SIGTERM)
        ended = started.end(HANG / 8)
    assert ended.code == 75, ended.errors
    assert ended.errors == "ddp: stopped: while nothing was trained (SIGTERM); continue with --resume auto\n"
    assert not output.exists()


@pytest.mark.slow
@pytest.mark.parametrize("layout", [pytest.param((), id="single"), pytest.param(DDP, id="torchrun")])
def test_it_changes_nothing_to_ask_again_and_again(tmp_path: Path, layout: tuple[str, ...]) -> None:
    """Whether two signals come at once, or one comes after the save, or while the interpreter ends."""
    words = ["train", str(WORDS[0]), *WORDS[1:], *layout, "--device", "cpu", "--fault", "slow@1", "--output", tmp_path]
    with running(*words) as process:
        wait_until(lambda: has_begun(tmp_path), HANG, "the first step")

        def has_left() -> bool:
            for number in (signal.SIGHUP, signal.SIGTERM):
                to_every_process(process, number)
            return process.poll() is not None

        wait_until(has_left, HANG, "it leaves")
        _, errors = process.communicate()
    assert process.returncode == 75, errors
    (line,) = errors.splitlines()
    assert line.startswith("ddp: stopped: at step ")
    assert trained(tmp_path)[1]["status"] == "stopped"


def test_what_is_ignored_at_the_start_stays_ignored() -> None:
    """`nohup` starts a command that way, and the training must outlive its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert stopping.asking_signals() == [signal.SIGTERM]
        with stopping.StopRequest() as stop_request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop_request.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_that_the_launcher_must_confirm_counts_once_it_has(tmp_path: Path) -> None:
    confirmed = tmp_path / "stop"
    with stopping.StopRequest(confirmed_by=str(confirmed)) as stop_request:
        os.kill(os.getpid(), signal.SIGTERM)
        assert not stop_request.requested
        confirmed.touch()
        assert stop_request.requested
        assert stop_request.reason == "SIGTERM"


@pytest.mark.parametrize(("seconds", "reason"), [(600.0, None), (0.0, "time limit")])
def test_a_time_that_is_up_is_a_request(seconds: float, reason: str | None) -> None:
    request = stopping.StopRequest(max_seconds=seconds)
    assert (request.requested, request.reason) == (reason is not None, reason)


def test_a_second_interrupt_is_heard_until_all_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    with stopping.StopRequest() as stop_request:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        assert exits == [130]
        stop_request.saved()
        os.kill(os.getpid(), signal.SIGINT)
    assert exits == [130]


@pytest.mark.parametrize("asked", [False, True])
def test_a_process_that_only_leaves_hears_nothing_but_the_first_interrupt(asked: bool) -> None:
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    with stopping.signals_as_before():
        with stopping.StopRequest(last=True):
            if asked:
                os.kill(os.getpid(), signal.SIGTERM)
        ignored = [signal.getsignal(number) is signal.SIG_IGN for number in numbers]
    assert ignored == [True, True, asked]


def test_an_unknown_signal_is_named_and_the_report_of_the_rank_that_was_asked_comes_first(tmp_path: Path) -> None:
    assert stopping.signal_named("usr1") == stopping.signal_named("SIGUSR1") == signal.SIGUSR1
    with pytest.raises(UserError, match="USR9"):
        stopping.StopRequest("USR9")
    for rank, reason in enumerate([stopping.ASKED_ELSEWHERE, "SIGTERM"]):
        report_end(
            World(rank=rank, world_size=2, report_dir=tmp_path), ExitCode.STOPPED, str(stopping.Stopped(reason, 7))
        )
    assert [report.rank for report in read_reports(tmp_path)] == [1, 0]
